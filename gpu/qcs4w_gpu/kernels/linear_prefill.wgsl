// linear_prefill: y[m, n] = scales[n] * sum over k of x[m, k] * code(n, k), for many rows of x on a GPU, in
// tiles through workgroup memory.
//
// Bindings as in linear_naive: 0 y, 1 x (seen as vec4<f32>), 2 weights, 3 scales, 4 params.
// The host guarantees what linear_naive asks for; that K_packed is a multiple of 16; and that rows of x lie a multiple
// of 32 columns apart, with zeros from K to there. Codes there are zero too: nothing is guarded along K.
// With SPLITS above 1 parts of K are summed apart, where there are too few tiles for the device: y is then
// (SPLITS, M, N), unscaled, and split_sum adds it up.
// One workgroup computes TILE_M x TILE_N of y, one invocation 16 x 8 of these: four vectors of rows and two of columns,
// a tile's quarter or half apart. Tiles lie column by column, four rows to a vector. An invocation loads four columns
// of four rows of x and of weights, turns them round in its registers, and has the next ones on their way while these
// are multiplied. All sums have names: an array of them, or a loop over TILE_K, was slower. The grid may be folded.
//
// Tried, M 2048, 8192 x 8192, TFLOP/s (NVIDIA H200, wgpu 0.32, Vulkan, naga's checks on;
// in the same runs a copy 4.12 TB/s, multiply-adds 54.7 TFLOP/s, cuBLAS fp32 50.4 TFLOP/s):
//   this 38.2; without naga's checks 40.5; without reading workgroup memory in the inner loop 46.7: that binds
//   8 x 8 an invocation: 128 x 128 x 16 34.4, 256 x 128 x 8 16 x 8 33.5, 64 x 128 x 16 34.5, 128 x 64 x 16 (8 x 4) 28.7
//   TILE_K 8 32.5; 4 columns a turn of a loop 28.1; linear_tiled 33.6
// M 128: 35.9 with SPLITS 4. M 512: 37.4.
//! grid = SPLITS * ceil(M / TILE_M) * ceil(N / TILE_N)
//! row_align = 16
//! x_align = 32

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

override SPLITS: u32 = 1u;
const TILE_M: u32 = 128u;
const TILE_N: u32 = 128u;
const TILE_K: u32 = 16u;  // as many columns as main multiplies
const THREADS_M: u32 = TILE_M / 16u;
const THREADS_N: u32 = TILE_N / 8u;
const THREADS: u32 = THREADS_M * THREADS_N;  // = TILE_M * TILE_K / 16 = TILE_N * TILE_K / 16: all load as much

var<workgroup> x_tile: array<array<vec4<f32>, TILE_M / 4u>, TILE_K>;
var<workgroup> w_tile: array<array<vec4<f32>, TILE_N / 4u>, TILE_K>;  // codes

fn codes_at(words: vec4<u32>, bit: u32) -> vec4<f32> {
  let nibbles = (words >> vec4<u32>(bit)) & vec4<u32>(0xFu);
  return bitcast<vec4<f32>>(nibbles | vec4<u32>(0x4B000000u)) - vec4<f32>(8388616.0);  // 2^23 + nibble, less 2^23 + 8
}

fn store_one(at: u32, n: u32, sum: f32) {
  if (n < params.N) { y[at] = sum * select(scales[n], 1.0, SPLITS > 1u); }
}

fn store_four(part: u32, m: u32, n: u32, sum: vec4<f32>) {
  if (m >= params.M) { return; }
  let at = (part * params.M + m) * params.N + n;
  store_one(at, n, sum.x);
  store_one(at + 1u, n + 1u, sum.y);
  store_one(at + 2u, n + 2u, sum.z);
  store_one(at + 3u, n + 3u, sum.w);
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let tiles_m = (params.M + TILE_M - 1u) / TILE_M;
  let tiles = tiles_m * ((params.N + TILE_N - 1u) / TILE_N);
  let index = workgroup.y * workgroups.x + workgroup.x;
  if (index >= SPLITS * tiles) { return; }  // uniform in the workgroup
  let part = index / tiles;
  let m0 = (index % tiles % tiles_m) * TILE_M;
  let n0 = (index % tiles / tiles_m) * TILE_N;
  let steps = (params.K + TILE_K - 1u) / TILE_K;
  let first = part * steps / SPLITS;
  let end = (part + 1u) * steps / SPLITS;
  let x_stride = (params.K + 31u) / 32u * 8u;  // vectors
  let w_stride = params.K_packed / 4u;  // words
  // 4 x 8 of 32 neighbouring invocations, for their reads of workgroup memory.
  let thread_n = local % 8u + local / 32u % (THREADS_N / 8u) * 8u;
  let thread_m = local / 8u % 4u + local / (4u * THREADS_N) * 4u;

  // What it loads: columns 4 * quarter.. of rows 4 * group.. of both.
  let quarter = local / 8u % (TILE_K / 4u);
  let group = local % 8u + local / (2u * TILE_K) * 8u;
  let last_m = vec4<u32>(params.M - 1u);
  let last_n = vec4<u32>(params.N - 1u);
  let four = vec4<u32>(group * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
  let x_at = min(vec4<u32>(m0) + four, last_m) * x_stride + quarter;
  let w_at = min(vec4<u32>(n0) + four, last_n) * w_stride + quarter / 2u;
  let half = vec4<u32>(quarter % 2u * 16u);
  var row0: vec4<f32>;
  var row1: vec4<f32>;
  var row2: vec4<f32>;
  var row3: vec4<f32>;
  var words: vec4<u32>;
  var c0_0 = vec4<f32>(); var c0_1 = vec4<f32>();
  var c1_0 = vec4<f32>(); var c1_1 = vec4<f32>();
  var c2_0 = vec4<f32>(); var c2_1 = vec4<f32>();
  var c3_0 = vec4<f32>(); var c3_1 = vec4<f32>();
  var c4_0 = vec4<f32>(); var c4_1 = vec4<f32>();
  var c5_0 = vec4<f32>(); var c5_1 = vec4<f32>();
  var c6_0 = vec4<f32>(); var c6_1 = vec4<f32>();
  var c7_0 = vec4<f32>(); var c7_1 = vec4<f32>();
  var c8_0 = vec4<f32>(); var c8_1 = vec4<f32>();
  var c9_0 = vec4<f32>(); var c9_1 = vec4<f32>();
  var c10_0 = vec4<f32>(); var c10_1 = vec4<f32>();
  var c11_0 = vec4<f32>(); var c11_1 = vec4<f32>();
  var c12_0 = vec4<f32>(); var c12_1 = vec4<f32>();
  var c13_0 = vec4<f32>(); var c13_1 = vec4<f32>();
  var c14_0 = vec4<f32>(); var c14_1 = vec4<f32>();
  var c15_0 = vec4<f32>(); var c15_1 = vec4<f32>();
  if (first < end) {
    let at_x = x_at + vec4<u32>(first * (TILE_K / 4u));
    row0 = x[at_x.x];
    row1 = x[at_x.y];
    row2 = x[at_x.z];
    row3 = x[at_x.w];
    let at_w = w_at + vec4<u32>(first * (TILE_K / 8u));
    words = vec4<u32>(weights[at_w.x], weights[at_w.y], weights[at_w.z], weights[at_w.w]) >> half;
  }
  for (var next = first + 1u; next <= end; next += 1u) {
    let k = quarter * 4u;
    x_tile[k][group] = vec4<f32>(row0.x, row1.x, row2.x, row3.x);
    x_tile[k + 1u][group] = vec4<f32>(row0.y, row1.y, row2.y, row3.y);
    x_tile[k + 2u][group] = vec4<f32>(row0.z, row1.z, row2.z, row3.z);
    x_tile[k + 3u][group] = vec4<f32>(row0.w, row1.w, row2.w, row3.w);
    w_tile[k][group] = codes_at(words, 4u);
    w_tile[k + 1u][group] = codes_at(words, 0u);
    w_tile[k + 2u][group] = codes_at(words, 12u);
    w_tile[k + 3u][group] = codes_at(words, 8u);
    workgroupBarrier();
    if (next < end) {
      let at_x = x_at + vec4<u32>(next * (TILE_K / 4u));
      row0 = x[at_x.x];
      row1 = x[at_x.y];
      row2 = x[at_x.z];
      row3 = x[at_x.w];
      let at_w = w_at + vec4<u32>(next * (TILE_K / 8u));
      words = vec4<u32>(weights[at_w.x], weights[at_w.y], weights[at_w.z], weights[at_w.w]) >> half;
    }
    { // column 0
      let a0 = x_tile[0][thread_m + 0u * THREADS_M];
      let a1 = x_tile[0][thread_m + 1u * THREADS_M];
      let a2 = x_tile[0][thread_m + 2u * THREADS_M];
      let a3 = x_tile[0][thread_m + 3u * THREADS_M];
      let b0 = w_tile[0][thread_n + 0u * THREADS_N];
      let b1 = w_tile[0][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 1
      let a0 = x_tile[1][thread_m + 0u * THREADS_M];
      let a1 = x_tile[1][thread_m + 1u * THREADS_M];
      let a2 = x_tile[1][thread_m + 2u * THREADS_M];
      let a3 = x_tile[1][thread_m + 3u * THREADS_M];
      let b0 = w_tile[1][thread_n + 0u * THREADS_N];
      let b1 = w_tile[1][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 2
      let a0 = x_tile[2][thread_m + 0u * THREADS_M];
      let a1 = x_tile[2][thread_m + 1u * THREADS_M];
      let a2 = x_tile[2][thread_m + 2u * THREADS_M];
      let a3 = x_tile[2][thread_m + 3u * THREADS_M];
      let b0 = w_tile[2][thread_n + 0u * THREADS_N];
      let b1 = w_tile[2][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 3
      let a0 = x_tile[3][thread_m + 0u * THREADS_M];
      let a1 = x_tile[3][thread_m + 1u * THREADS_M];
      let a2 = x_tile[3][thread_m + 2u * THREADS_M];
      let a3 = x_tile[3][thread_m + 3u * THREADS_M];
      let b0 = w_tile[3][thread_n + 0u * THREADS_N];
      let b1 = w_tile[3][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 4
      let a0 = x_tile[4][thread_m + 0u * THREADS_M];
      let a1 = x_tile[4][thread_m + 1u * THREADS_M];
      let a2 = x_tile[4][thread_m + 2u * THREADS_M];
      let a3 = x_tile[4][thread_m + 3u * THREADS_M];
      let b0 = w_tile[4][thread_n + 0u * THREADS_N];
      let b1 = w_tile[4][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 5
      let a0 = x_tile[5][thread_m + 0u * THREADS_M];
      let a1 = x_tile[5][thread_m + 1u * THREADS_M];
      let a2 = x_tile[5][thread_m + 2u * THREADS_M];
      let a3 = x_tile[5][thread_m + 3u * THREADS_M];
      let b0 = w_tile[5][thread_n + 0u * THREADS_N];
      let b1 = w_tile[5][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 6
      let a0 = x_tile[6][thread_m + 0u * THREADS_M];
      let a1 = x_tile[6][thread_m + 1u * THREADS_M];
      let a2 = x_tile[6][thread_m + 2u * THREADS_M];
      let a3 = x_tile[6][thread_m + 3u * THREADS_M];
      let b0 = w_tile[6][thread_n + 0u * THREADS_N];
      let b1 = w_tile[6][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 7
      let a0 = x_tile[7][thread_m + 0u * THREADS_M];
      let a1 = x_tile[7][thread_m + 1u * THREADS_M];
      let a2 = x_tile[7][thread_m + 2u * THREADS_M];
      let a3 = x_tile[7][thread_m + 3u * THREADS_M];
      let b0 = w_tile[7][thread_n + 0u * THREADS_N];
      let b1 = w_tile[7][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 8
      let a0 = x_tile[8][thread_m + 0u * THREADS_M];
      let a1 = x_tile[8][thread_m + 1u * THREADS_M];
      let a2 = x_tile[8][thread_m + 2u * THREADS_M];
      let a3 = x_tile[8][thread_m + 3u * THREADS_M];
      let b0 = w_tile[8][thread_n + 0u * THREADS_N];
      let b1 = w_tile[8][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 9
      let a0 = x_tile[9][thread_m + 0u * THREADS_M];
      let a1 = x_tile[9][thread_m + 1u * THREADS_M];
      let a2 = x_tile[9][thread_m + 2u * THREADS_M];
      let a3 = x_tile[9][thread_m + 3u * THREADS_M];
      let b0 = w_tile[9][thread_n + 0u * THREADS_N];
      let b1 = w_tile[9][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 10
      let a0 = x_tile[10][thread_m + 0u * THREADS_M];
      let a1 = x_tile[10][thread_m + 1u * THREADS_M];
      let a2 = x_tile[10][thread_m + 2u * THREADS_M];
      let a3 = x_tile[10][thread_m + 3u * THREADS_M];
      let b0 = w_tile[10][thread_n + 0u * THREADS_N];
      let b1 = w_tile[10][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 11
      let a0 = x_tile[11][thread_m + 0u * THREADS_M];
      let a1 = x_tile[11][thread_m + 1u * THREADS_M];
      let a2 = x_tile[11][thread_m + 2u * THREADS_M];
      let a3 = x_tile[11][thread_m + 3u * THREADS_M];
      let b0 = w_tile[11][thread_n + 0u * THREADS_N];
      let b1 = w_tile[11][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 12
      let a0 = x_tile[12][thread_m + 0u * THREADS_M];
      let a1 = x_tile[12][thread_m + 1u * THREADS_M];
      let a2 = x_tile[12][thread_m + 2u * THREADS_M];
      let a3 = x_tile[12][thread_m + 3u * THREADS_M];
      let b0 = w_tile[12][thread_n + 0u * THREADS_N];
      let b1 = w_tile[12][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 13
      let a0 = x_tile[13][thread_m + 0u * THREADS_M];
      let a1 = x_tile[13][thread_m + 1u * THREADS_M];
      let a2 = x_tile[13][thread_m + 2u * THREADS_M];
      let a3 = x_tile[13][thread_m + 3u * THREADS_M];
      let b0 = w_tile[13][thread_n + 0u * THREADS_N];
      let b1 = w_tile[13][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 14
      let a0 = x_tile[14][thread_m + 0u * THREADS_M];
      let a1 = x_tile[14][thread_m + 1u * THREADS_M];
      let a2 = x_tile[14][thread_m + 2u * THREADS_M];
      let a3 = x_tile[14][thread_m + 3u * THREADS_M];
      let b0 = w_tile[14][thread_n + 0u * THREADS_N];
      let b1 = w_tile[14][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    { // column 15
      let a0 = x_tile[15][thread_m + 0u * THREADS_M];
      let a1 = x_tile[15][thread_m + 1u * THREADS_M];
      let a2 = x_tile[15][thread_m + 2u * THREADS_M];
      let a3 = x_tile[15][thread_m + 3u * THREADS_M];
      let b0 = w_tile[15][thread_n + 0u * THREADS_N];
      let b1 = w_tile[15][thread_n + 1u * THREADS_N];
      c0_0 = fma(vec4<f32>(a0.x), b0, c0_0); c0_1 = fma(vec4<f32>(a0.x), b1, c0_1);
      c1_0 = fma(vec4<f32>(a0.y), b0, c1_0); c1_1 = fma(vec4<f32>(a0.y), b1, c1_1);
      c2_0 = fma(vec4<f32>(a0.z), b0, c2_0); c2_1 = fma(vec4<f32>(a0.z), b1, c2_1);
      c3_0 = fma(vec4<f32>(a0.w), b0, c3_0); c3_1 = fma(vec4<f32>(a0.w), b1, c3_1);
      c4_0 = fma(vec4<f32>(a1.x), b0, c4_0); c4_1 = fma(vec4<f32>(a1.x), b1, c4_1);
      c5_0 = fma(vec4<f32>(a1.y), b0, c5_0); c5_1 = fma(vec4<f32>(a1.y), b1, c5_1);
      c6_0 = fma(vec4<f32>(a1.z), b0, c6_0); c6_1 = fma(vec4<f32>(a1.z), b1, c6_1);
      c7_0 = fma(vec4<f32>(a1.w), b0, c7_0); c7_1 = fma(vec4<f32>(a1.w), b1, c7_1);
      c8_0 = fma(vec4<f32>(a2.x), b0, c8_0); c8_1 = fma(vec4<f32>(a2.x), b1, c8_1);
      c9_0 = fma(vec4<f32>(a2.y), b0, c9_0); c9_1 = fma(vec4<f32>(a2.y), b1, c9_1);
      c10_0 = fma(vec4<f32>(a2.z), b0, c10_0); c10_1 = fma(vec4<f32>(a2.z), b1, c10_1);
      c11_0 = fma(vec4<f32>(a2.w), b0, c11_0); c11_1 = fma(vec4<f32>(a2.w), b1, c11_1);
      c12_0 = fma(vec4<f32>(a3.x), b0, c12_0); c12_1 = fma(vec4<f32>(a3.x), b1, c12_1);
      c13_0 = fma(vec4<f32>(a3.y), b0, c13_0); c13_1 = fma(vec4<f32>(a3.y), b1, c13_1);
      c14_0 = fma(vec4<f32>(a3.z), b0, c14_0); c14_1 = fma(vec4<f32>(a3.z), b1, c14_1);
      c15_0 = fma(vec4<f32>(a3.w), b0, c15_0); c15_1 = fma(vec4<f32>(a3.w), b1, c15_1);
    }
    workgroupBarrier();
  }

  let m = m0 + thread_m * 4u;
  let n = n0 + thread_n * 4u;
  store_four(part, m + 0u * THREADS_M * 4u + 0u, n + 0u * THREADS_N * 4u, c0_0);
  store_four(part, m + 0u * THREADS_M * 4u + 0u, n + 1u * THREADS_N * 4u, c0_1);
  store_four(part, m + 0u * THREADS_M * 4u + 1u, n + 0u * THREADS_N * 4u, c1_0);
  store_four(part, m + 0u * THREADS_M * 4u + 1u, n + 1u * THREADS_N * 4u, c1_1);
  store_four(part, m + 0u * THREADS_M * 4u + 2u, n + 0u * THREADS_N * 4u, c2_0);
  store_four(part, m + 0u * THREADS_M * 4u + 2u, n + 1u * THREADS_N * 4u, c2_1);
  store_four(part, m + 0u * THREADS_M * 4u + 3u, n + 0u * THREADS_N * 4u, c3_0);
  store_four(part, m + 0u * THREADS_M * 4u + 3u, n + 1u * THREADS_N * 4u, c3_1);
  store_four(part, m + 1u * THREADS_M * 4u + 0u, n + 0u * THREADS_N * 4u, c4_0);
  store_four(part, m + 1u * THREADS_M * 4u + 0u, n + 1u * THREADS_N * 4u, c4_1);
  store_four(part, m + 1u * THREADS_M * 4u + 1u, n + 0u * THREADS_N * 4u, c5_0);
  store_four(part, m + 1u * THREADS_M * 4u + 1u, n + 1u * THREADS_N * 4u, c5_1);
  store_four(part, m + 1u * THREADS_M * 4u + 2u, n + 0u * THREADS_N * 4u, c6_0);
  store_four(part, m + 1u * THREADS_M * 4u + 2u, n + 1u * THREADS_N * 4u, c6_1);
  store_four(part, m + 1u * THREADS_M * 4u + 3u, n + 0u * THREADS_N * 4u, c7_0);
  store_four(part, m + 1u * THREADS_M * 4u + 3u, n + 1u * THREADS_N * 4u, c7_1);
  store_four(part, m + 2u * THREADS_M * 4u + 0u, n + 0u * THREADS_N * 4u, c8_0);
  store_four(part, m + 2u * THREADS_M * 4u + 0u, n + 1u * THREADS_N * 4u, c8_1);
  store_four(part, m + 2u * THREADS_M * 4u + 1u, n + 0u * THREADS_N * 4u, c9_0);
  store_four(part, m + 2u * THREADS_M * 4u + 1u, n + 1u * THREADS_N * 4u, c9_1);
  store_four(part, m + 2u * THREADS_M * 4u + 2u, n + 0u * THREADS_N * 4u, c10_0);
  store_four(part, m + 2u * THREADS_M * 4u + 2u, n + 1u * THREADS_N * 4u, c10_1);
  store_four(part, m + 2u * THREADS_M * 4u + 3u, n + 0u * THREADS_N * 4u, c11_0);
  store_four(part, m + 2u * THREADS_M * 4u + 3u, n + 1u * THREADS_N * 4u, c11_1);
  store_four(part, m + 3u * THREADS_M * 4u + 0u, n + 0u * THREADS_N * 4u, c12_0);
  store_four(part, m + 3u * THREADS_M * 4u + 0u, n + 1u * THREADS_N * 4u, c12_1);
  store_four(part, m + 3u * THREADS_M * 4u + 1u, n + 0u * THREADS_N * 4u, c13_0);
  store_four(part, m + 3u * THREADS_M * 4u + 1u, n + 1u * THREADS_N * 4u, c13_1);
  store_four(part, m + 3u * THREADS_M * 4u + 2u, n + 0u * THREADS_N * 4u, c14_0);
  store_four(part, m + 3u * THREADS_M * 4u + 2u, n + 1u * THREADS_N * 4u, c14_1);
  store_four(part, m + 3u * THREADS_M * 4u + 3u, n + 0u * THREADS_N * 4u, c15_0);
  store_four(part, m + 3u * THREADS_M * 4u + 3u, n + 1u * THREADS_N * 4u, c15_1);
}
