// linear_gemv: y[m, n] = scales[n] * sum over k of x[m, k] * code(n, k), for few rows of x: weights are read once per
// row, 16 bytes at a time, neighbouring invocations reading neighbouring bytes.
//
// Bindings as in linear_naive: 0 y, 1 x, 2 weights (seen as vec4<u32>), 3 scales, 4 params {M, N, K, K_packed}.
// The host guarantees what linear_naive asks for, and that K_packed is a multiple of 16. What lies between K and the
// row's end is never multiplied by anything but zero.
// One workgroup computes ROWS_N neighbouring y of one row m. Each invocation keeps 32 columns of x in registers, walks
// over the rows of weights, and keeps its sums to the end, where the workgroup adds them up. Workgroups that read the
// same weights (all m of the same n) are neighbours, so that these are still in the cache. The grid may be folded.
//
// A nibble becomes a float without a conversion: left in its place at bit p and put under the exponent of 2^(23 - p),
// where bit p is worth 1, it reads 2^(23 - p) + nibble; taking off 2^(23 - p) + 8 is exact.
//! grid = M * ceil(N / ROWS_N)
//! row_align = 16

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const THREADS: u32 = 128u;
const ROWS_N: u32 = 4u;  // one component of a vec4 each when the sums are added up
const COLUMNS: u32 = 32u;  // of x in the registers of one invocation: one vec4<u32> of weights

const EVEN_MASK = vec4<u32>(0xF0u, 0xF000u, 0xF0u, 0xF000u);
const EVEN_EXPONENT = vec4<u32>(0x49000000u, 0x45000000u, 0x49000000u, 0x45000000u);  // of 2^19, 2^11
const EVEN_EXCESS = vec4<f32>(524296.0, 2056.0, 524296.0, 2056.0);
const ODD_MASK = vec4<u32>(0xFu, 0xF00u, 0xFu, 0xF00u);
const ODD_EXPONENT = vec4<u32>(0x4B000000u, 0x47000000u, 0x4B000000u, 0x47000000u);  // of 2^23, 2^15
const ODD_EXCESS = vec4<f32>(8388616.0, 32776.0, 8388616.0, 32776.0);

var<workgroup> partial_sums: array<vec4<f32>, THREADS>;

fn x_at(m: u32, k: u32) -> f32 {
  if (k >= params.K) { return 0.0; }
  return x[m * params.K + k];
}

fn x_four(m: u32, k: u32) -> vec4<f32> {  // every other column, as one kind of nibble lies in a word
  return vec4<f32>(x_at(m, k), x_at(m, k + 2u), x_at(m, k + 4u), x_at(m, k + 6u));
}

fn even_codes(word: u32) -> vec4<f32> {
  let halves = vec4<u32>(word, word, word >> 16u, word >> 16u);
  return bitcast<vec4<f32>>((halves & EVEN_MASK) | EVEN_EXPONENT) - EVEN_EXCESS;
}

fn odd_codes(word: u32) -> vec4<f32> {
  let halves = vec4<u32>(word, word, word >> 16u, word >> 16u);
  return bitcast<vec4<f32>>((halves & ODD_MASK) | ODD_EXPONENT) - ODD_EXCESS;
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let groups_n = (params.N + ROWS_N - 1u) / ROWS_N;
  let index = workgroup.y * workgroups.x + workgroup.x;
  if (index >= params.M * groups_n) { return; }  // uniform in the workgroup
  let m = index % params.M;
  let n0 = (index / params.M) * ROWS_N;
  let last = params.N - 1u;
  let stride = params.K_packed / 16u;
  let row = vec4<u32>(n0, min(n0 + 1u, last), min(n0 + 2u, last), min(n0 + 3u, last)) * stride;

  var sum0 = vec4<f32>();
  var sum1 = vec4<f32>();
  var sum2 = vec4<f32>();
  var sum3 = vec4<f32>();
  for (var at = local; at < stride; at += THREADS) {
    let w0 = weights[row.x + at];
    let w1 = weights[row.y + at];
    let w2 = weights[row.z + at];
    let w3 = weights[row.w + at];
    let k0 = at * COLUMNS;
    for (var j = 0u; j < 4u; j += 1u) {
      let xe = x_four(m, k0 + j * 8u);
      let xo = x_four(m, k0 + j * 8u + 1u);
      sum0 = fma(xo, odd_codes(w0[j]), fma(xe, even_codes(w0[j]), sum0));
      sum1 = fma(xo, odd_codes(w1[j]), fma(xe, even_codes(w1[j]), sum1));
      sum2 = fma(xo, odd_codes(w2[j]), fma(xe, even_codes(w2[j]), sum2));
      sum3 = fma(xo, odd_codes(w3[j]), fma(xe, even_codes(w3[j]), sum3));
    }
  }

  let ones = vec4<f32>(1.0);
  partial_sums[local] = vec4<f32>(dot(sum0, ones), dot(sum1, ones), dot(sum2, ones), dot(sum3, ones));
  workgroupBarrier();
  for (var step = THREADS / 2u; step > 0u; step /= 2u) {
    if (local < step) { partial_sums[local] += partial_sums[local + step]; }
    workgroupBarrier();
  }
  if (local < ROWS_N && n0 + local < params.N) {
    y[m * params.N + n0 + local] = partial_sums[0][local] * scales[n0 + local];
  }
}
