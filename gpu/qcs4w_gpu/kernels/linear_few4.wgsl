// linear_few4: y[m, n] = scales[n] * sum over k of x[m, k] * code(n, k), for a few rows of x on a GPU:
// 4 rows at a time, for which a weight is made a float once.
//
// Bindings as in linear_naive: 0 y, 1 x (seen as vec4<f32>), 2 weights (seen as vec4<u32>), 3 scales, 4 params.
// The host guarantees what linear_naive asks for; that K_packed is a multiple of 16; and that rows of x lie a multiple
// of 32 columns apart, with zeros from K to there. Codes there are zero too. Holds for every finite x, as
// linear_decode.
// With SPLITS above 1 parts of K are summed apart, for weights of few rows: y is then (SPLITS, M, N), unscaled, and
// split_sum adds it up.
// One workgroup computes TILE_M x TILE_N of y. Its LINES lines of 32 invocations take 32 columns each of a chunk, and
// an invocation 4 rows of weights, 32 apart; all of a line read the same x from workgroup memory. The grid may be
// folded.
//
// Tried, 28672 x 8192, microseconds in a chain (NVIDIA H200, wgpu 0.32, Vulkan, naga's checks on;
// in the same runs a copy 4.12 TB/s, multiply-adds 54.7 TFLOP/s, cuBLAS fp32 50.4 TFLOP/s):
//   this, M 4: 117; two rows of weights an invocation 120 (M 4); 4 lines 146 (M 4)
//   linear_decode, a row after the other, 160 (M 4); cuBLAS fp32 421 (M 4)
//! grid = SPLITS * ceil(M / TILE_M) * ceil(N / TILE_N)
//! row_align = 16
//! x_align = 32

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

override SPLITS: u32 = 1u;
const TILE_M: u32 = 4u;  // as many as main has variables for
const TILE_N: u32 = 128u;
const LINES: u32 = 8u;
const THREADS: u32 = LINES * 32u;

var<workgroup> x_tile: array<array<vec4<f32>, LINES * 8u>, TILE_M>;  // (TILE_M, 32 columns of every line)
var<workgroup> line_sums: array<vec4<f32>, THREADS>;

struct Codes { a: vec4<f32>, b: vec4<f32> }

// Eight codes of a word as floats, without a conversion: a nibble left in its place at bit p, under the exponent of
// 2^(23 - p), reads 2^(23 - p) + nibble; taking off 2^(23 - p) + 8 is exact. `zero` is zero, which no compiler knows:
// the mask and the exponent are then one instruction, while two constants would be two.
fn codes(word: u32, zero: u32) -> Codes {
  let high = word >> 16u;
  let e19 = zero | 0x49000000u;
  let e23 = zero | 0x4B000000u;
  let e11 = zero | 0x45000000u;
  let e15 = zero | 0x47000000u;
  return Codes(
    vec4<f32>(
      bitcast<f32>((word & 0xF0u) | e19) - 524296.0,
      bitcast<f32>((word & 0xFu) | e23) - 8388616.0,
      bitcast<f32>((word & 0xF000u) | e11) - 2056.0,
      bitcast<f32>((word & 0xF00u) | e15) - 32776.0,
    ),
    vec4<f32>(
      bitcast<f32>((high & 0xF0u) | e19) - 524296.0,
      bitcast<f32>((high & 0xFu) | e23) - 8388616.0,
      bitcast<f32>((high & 0xF000u) | e11) - 2056.0,
      bitcast<f32>((high & 0xF00u) | e15) - 32776.0,
    ),
  );
}

fn add_eight(sum: f32, c: Codes, a: vec4<f32>, b: vec4<f32>) -> f32 {
  let first = fma(a.w, c.a.w, fma(a.z, c.a.z, fma(a.y, c.a.y, fma(a.x, c.a.x, sum))));
  return fma(b.w, c.b.w, fma(b.z, c.b.z, fma(b.y, c.b.y, fma(b.x, c.b.x, first))));
}

// Adds eight columns to the sums of one row of x and four of weights; `at` is where these columns lie in x_tile.
fn add_columns(sums: vec4<f32>, m: u32, at: u32, c0: Codes, c1: Codes, c2: Codes, c3: Codes) -> vec4<f32> {
  let a = x_tile[m][at];
  let b = x_tile[m][at + 1u];
  return vec4<f32>(
    add_eight(sums.x, c0, a, b), add_eight(sums.y, c1, a, b), add_eight(sums.z, c2, a, b), add_eight(sums.w, c3, a, b));
}

fn write(m: u32, n0: u32, part: u32, local: u32) {
  let n = n0 + local;
  if (m >= params.M || local >= TILE_N || n >= params.N) { return; }
  var sum = 0.0;
  for (var line = 0u; line < LINES; line += 1u) { sum += line_sums[line * 32u + local % 32u][local / 32u]; }
  y[(part * params.M + m) * params.N + n] = sum * select(scales[n], 1.0, SPLITS > 1u);
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
  let stride = params.K_packed / 16u;  // vectors from one row of weights to the next
  let blocks = (params.K + 31u) / 32u;  // of 32 columns
  let chunks = (blocks + LINES - 1u) / LINES;
  let lane = local % 32u;
  let line = local / 32u;
  let zero = params.K_packed >> 31u;
  let last_m = params.M - 1u;
  let last_n = params.N - 1u;

  let row0 = min(n0 + lane + 0u, last_n) * stride;
  let row1 = min(n0 + lane + 32u, last_n) * stride;
  let row2 = min(n0 + lane + 64u, last_n) * stride;
  let row3 = min(n0 + lane + 96u, last_n) * stride;
  var sum0 = vec4<f32>();
  var sum1 = vec4<f32>();
  var sum2 = vec4<f32>();
  var sum3 = vec4<f32>();
  for (var chunk = part * chunks / SPLITS; chunk < (part + 1u) * chunks / SPLITS; chunk += 1u) {
    let first = chunk * LINES;
    let block = min(first + line, blocks - 1u);
    let words0 = weights[row0 + block];
    let words1 = weights[row1 + block];
    let words2 = weights[row2 + block];
    let words3 = weights[row3 + block];
    workgroupBarrier();
    for (var i = local; i < TILE_M * LINES * 8u; i += THREADS) {
      let m = min(m0 + i / (LINES * 8u), last_m);
      let at = first * 8u + i % (LINES * 8u);
      x_tile[i / (LINES * 8u)][i % (LINES * 8u)] = select(vec4<f32>(), x[m * blocks * 8u + at], at < blocks * 8u);
    }
    workgroupBarrier();
    let column = line * 8u;
    {
      let c0 = codes(words0.x, zero);
      let c1 = codes(words1.x, zero);
      let c2 = codes(words2.x, zero);
      let c3 = codes(words3.x, zero);
      sum0 = add_columns(sum0, 0u, column + 0u, c0, c1, c2, c3);
      sum1 = add_columns(sum1, 1u, column + 0u, c0, c1, c2, c3);
      sum2 = add_columns(sum2, 2u, column + 0u, c0, c1, c2, c3);
      sum3 = add_columns(sum3, 3u, column + 0u, c0, c1, c2, c3);
    }
    {
      let c0 = codes(words0.y, zero);
      let c1 = codes(words1.y, zero);
      let c2 = codes(words2.y, zero);
      let c3 = codes(words3.y, zero);
      sum0 = add_columns(sum0, 0u, column + 2u, c0, c1, c2, c3);
      sum1 = add_columns(sum1, 1u, column + 2u, c0, c1, c2, c3);
      sum2 = add_columns(sum2, 2u, column + 2u, c0, c1, c2, c3);
      sum3 = add_columns(sum3, 3u, column + 2u, c0, c1, c2, c3);
    }
    {
      let c0 = codes(words0.z, zero);
      let c1 = codes(words1.z, zero);
      let c2 = codes(words2.z, zero);
      let c3 = codes(words3.z, zero);
      sum0 = add_columns(sum0, 0u, column + 4u, c0, c1, c2, c3);
      sum1 = add_columns(sum1, 1u, column + 4u, c0, c1, c2, c3);
      sum2 = add_columns(sum2, 2u, column + 4u, c0, c1, c2, c3);
      sum3 = add_columns(sum3, 3u, column + 4u, c0, c1, c2, c3);
    }
    {
      let c0 = codes(words0.w, zero);
      let c1 = codes(words1.w, zero);
      let c2 = codes(words2.w, zero);
      let c3 = codes(words3.w, zero);
      sum0 = add_columns(sum0, 0u, column + 6u, c0, c1, c2, c3);
      sum1 = add_columns(sum1, 1u, column + 6u, c0, c1, c2, c3);
      sum2 = add_columns(sum2, 2u, column + 6u, c0, c1, c2, c3);
      sum3 = add_columns(sum3, 3u, column + 6u, c0, c1, c2, c3);
    }
  }

  workgroupBarrier();
  line_sums[local] = sum0;
  workgroupBarrier();
  write(m0 + 0u, n0, part, local);
  workgroupBarrier();
  line_sums[local] = sum1;
  workgroupBarrier();
  write(m0 + 1u, n0, part, local);
  workgroupBarrier();
  line_sums[local] = sum2;
  workgroupBarrier();
  write(m0 + 2u, n0, part, local);
  workgroupBarrier();
  line_sums[local] = sum3;
  workgroupBarrier();
  write(m0 + 3u, n0, part, local);
}
