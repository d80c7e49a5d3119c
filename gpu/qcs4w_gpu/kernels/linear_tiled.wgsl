// linear_tiled: y[m, n] = scales[n] * sum over k of x[m, k] * code(n, k), in tiles through workgroup memory.
//
// Bindings as in linear_naive: 0 y, 1 x, 2 weights, 3 scales, 4 params {M, N, K, K_packed}.
// The host guarantees what linear_naive asks for, and that K_packed is a multiple of 4, so that a row starts
// on a word. What lies between K and the row's end is never multiplied by anything but zero.
// One workgroup computes TILE_M x TILE_N of y, one invocation 8 x 8 of these. Tiles lie in workgroup memory column by
// column, four rows to a vec4, so that eight rows of x and eight of weights are four reads. Workgroups that read the
// same weights (all m of the same n) are neighbours. The grid may be folded.
//
// The 64 sums of an invocation are addressed by constants only: one loop over them, in the multiplication or in the
// store, puts them into slow memory and made the kernel many times slower on an NVIDIA H200.
// Loops take several columns a turn, since Mesa's llvmpipe leaves a kernel's loops, unfinished, after 65,535 turns in
// all: right up to K = 131,072 there.
//! grid = ceil(M / TILE_M) * ceil(N / TILE_N)
//! row_align = 4

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const TILE_M: u32 = 64u;
const TILE_N: u32 = 128u;
const TILE_K: u32 = 16u;
const THREADS_M: u32 = TILE_M / 8u;
const THREADS_N: u32 = TILE_N / 8u;
const THREADS: u32 = THREADS_M * THREADS_N;
const X_STRIDE: u32 = TILE_M / 4u + 1u;  // one more than a column, so that columns lie in different banks
const W_STRIDE: u32 = TILE_N / 4u + 1u;

var<workgroup> x_tile: array<vec4<f32>, TILE_K * X_STRIDE>;  // (TILE_K, TILE_M / 4)
var<workgroup> w_tile: array<vec4<f32>, TILE_K * W_STRIDE>;  // (TILE_K, TILE_N / 4), codes

fn x_at(m: u32, k: u32) -> f32 {
  if (m >= params.M || k >= params.K) { return 0.0; }
  return x[m * params.K + k];
}

fn x_four(m: u32, k: u32) -> vec4<f32> {
  return vec4<f32>(x_at(m, k), x_at(m + 1u, k), x_at(m + 2u, k), x_at(m + 3u, k));
}

fn word_at(n: u32, word: u32) -> u32 {
  let row_words = params.K_packed / 4u;
  if (n >= params.N || word >= row_words) { return 0x88888888u; }  // codes of zero
  return weights[n * row_words + word];
}

fn codes_at(words: vec4<u32>, bit: u32) -> vec4<f32> {
  return vec4<f32>(vec4<i32>((words >> vec4<u32>(bit)) & vec4<u32>(0xFu)) - 8);
}

fn load_tiles(m0: u32, n0: u32, k0: u32, local: u32) {
  // Two columns of four rows of x at a time.
  for (var i = local; i < TILE_M / 4u * (TILE_K / 2u); i += THREADS) {
    let k = (i % (TILE_K / 2u)) * 2u;
    let group = i / (TILE_K / 2u);
    x_tile[k * X_STRIDE + group] = x_four(m0 + group * 4u, k0 + k);
    x_tile[(k + 1u) * X_STRIDE + group] = x_four(m0 + group * 4u, k0 + k + 1u);
  }
  // Four columns of four rows of weights at a time: half a word of each.
  for (var i = local; i < TILE_N / 4u * (TILE_K / 4u); i += THREADS) {
    let k = (i % (TILE_K / 4u)) * 4u;
    let group = i / (TILE_K / 4u);
    let n = n0 + group * 4u;
    let word = (k0 + k) / 8u;
    let words = vec4<u32>(word_at(n, word), word_at(n + 1u, word), word_at(n + 2u, word), word_at(n + 3u, word));
    let half = words >> vec4<u32>((k % 8u) * 4u);
    w_tile[k * W_STRIDE + group] = codes_at(half, 4u);
    w_tile[(k + 1u) * W_STRIDE + group] = codes_at(half, 0u);
    w_tile[(k + 2u) * W_STRIDE + group] = codes_at(half, 12u);
    w_tile[(k + 3u) * W_STRIDE + group] = codes_at(half, 8u);
  }
}

// Adds the products of column k of the tiles: sums[2 i] and sums[2 i + 1] are row i of the invocation's 8 x 8.
fn multiply(sums: ptr<function, array<vec4<f32>, 16>>, thread_m: u32, thread_n: u32, k: u32) {
  let a = x_tile[k * X_STRIDE + thread_m * 2u];
  let b = x_tile[k * X_STRIDE + thread_m * 2u + 1u];
  let c = w_tile[k * W_STRIDE + thread_n];
  let d = w_tile[k * W_STRIDE + thread_n + THREADS_N];
  (*sums)[0] = fma(vec4<f32>(a.x), c, (*sums)[0]);
  (*sums)[1] = fma(vec4<f32>(a.x), d, (*sums)[1]);
  (*sums)[2] = fma(vec4<f32>(a.y), c, (*sums)[2]);
  (*sums)[3] = fma(vec4<f32>(a.y), d, (*sums)[3]);
  (*sums)[4] = fma(vec4<f32>(a.z), c, (*sums)[4]);
  (*sums)[5] = fma(vec4<f32>(a.z), d, (*sums)[5]);
  (*sums)[6] = fma(vec4<f32>(a.w), c, (*sums)[6]);
  (*sums)[7] = fma(vec4<f32>(a.w), d, (*sums)[7]);
  (*sums)[8] = fma(vec4<f32>(b.x), c, (*sums)[8]);
  (*sums)[9] = fma(vec4<f32>(b.x), d, (*sums)[9]);
  (*sums)[10] = fma(vec4<f32>(b.y), c, (*sums)[10]);
  (*sums)[11] = fma(vec4<f32>(b.y), d, (*sums)[11]);
  (*sums)[12] = fma(vec4<f32>(b.z), c, (*sums)[12]);
  (*sums)[13] = fma(vec4<f32>(b.z), d, (*sums)[13]);
  (*sums)[14] = fma(vec4<f32>(b.w), c, (*sums)[14]);
  (*sums)[15] = fma(vec4<f32>(b.w), d, (*sums)[15]);
}

fn store_four(m: u32, n: u32, sum: vec4<f32>) {
  if (m >= params.M) { return; }
  let at = m * params.N + n;
  if (n < params.N) { y[at] = sum.x * scales[n]; }
  if (n + 1u < params.N) { y[at + 1u] = sum.y * scales[n + 1u]; }
  if (n + 2u < params.N) { y[at + 2u] = sum.z * scales[n + 2u]; }
  if (n + 3u < params.N) { y[at + 3u] = sum.w * scales[n + 3u]; }
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let tiles_n = (params.N + TILE_N - 1u) / TILE_N;
  let tiles_m = (params.M + TILE_M - 1u) / TILE_M;
  let tile = workgroup.y * workgroups.x + workgroup.x;
  if (tile >= tiles_m * tiles_n) { return; }  // uniform in the workgroup
  let m0 = (tile % tiles_m) * TILE_M;
  let n0 = (tile / tiles_m) * TILE_N;
  let thread_m = local / THREADS_N;
  let thread_n = local % THREADS_N;

  var sums = array<vec4<f32>, 16>();
  for (var k0 = 0u; k0 < params.K; k0 += TILE_K) {
    load_tiles(m0, n0, k0, local);
    workgroupBarrier();
    for (var k = 0u; k < TILE_K; k += 4u) {
      multiply(&sums, thread_m, thread_n, k);
      multiply(&sums, thread_m, thread_n, k + 1u);
      multiply(&sums, thread_m, thread_n, k + 2u);
      multiply(&sums, thread_m, thread_n, k + 3u);
    }
    workgroupBarrier();
  }

  let m = m0 + thread_m * 8u;
  let n = n0 + thread_n * 4u;
  store_four(m + 0u, n, sums[0]);
  store_four(m + 0u, n + TILE_N / 2u, sums[1]);
  store_four(m + 1u, n, sums[2]);
  store_four(m + 1u, n + TILE_N / 2u, sums[3]);
  store_four(m + 2u, n, sums[4]);
  store_four(m + 2u, n + TILE_N / 2u, sums[5]);
  store_four(m + 3u, n, sums[6]);
  store_four(m + 3u, n + TILE_N / 2u, sums[7]);
  store_four(m + 4u, n, sums[8]);
  store_four(m + 4u, n + TILE_N / 2u, sums[9]);
  store_four(m + 5u, n, sums[10]);
  store_four(m + 5u, n + TILE_N / 2u, sums[11]);
  store_four(m + 6u, n, sums[12]);
  store_four(m + 6u, n + TILE_N / 2u, sums[13]);
  store_four(m + 7u, n, sums[14]);
  store_four(m + 7u, n + TILE_N / 2u, sums[15]);
}
