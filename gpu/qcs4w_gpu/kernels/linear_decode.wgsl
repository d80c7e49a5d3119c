// linear_decode: y[m, n] = scales[n] * sum over k of x[m, k] * code(n, k), for one row of x, or two, on a GPU.
//
// Bindings as in linear_naive: 0 y, 1 x (seen as vec4<f32>), 2 weights (seen as vec4<u32>), 3 scales, 4 params.
// The host guarantees what linear_naive asks for; that K_packed is a multiple of 16; and that rows of x lie a multiple
// of 32 columns apart, with zeros from K to there. Codes there are zero too: nothing is guarded along K.
// Holds for every finite x: codes are exact, and every sum is of float32 products.
// One workgroup computes THREADS / LANES_K * ROWS_EACH neighbouring y of one row m: LANES_K invocations share a row of
// weights, 32 columns at a time, and each takes ROWS_EACH rows, so that x is read once for ROWS_EACH of them. The next weights
// are on their way while these are multiplied. Workgroups that read the same weights (all m of the same n) are
// neighbours.
// The grid may be folded.
//
// Tried, M 1, 28672 x 8192, microseconds in a chain (NVIDIA H200, wgpu 0.32, Vulkan, naga's checks on; a copy 4.12 TB/s
// in the same runs):
//   this 48.1, 59 % of the copy's rate; without the multiplication 30.7, 93 %; without reading weights 43.3: arithmetic
//     binds
//   exponents as constants 54.3; no reading ahead 54.9; 16 rows 48.7; 4 rows 73.7; 256 invocations 51.0
//   nibbles in pairs under the exponents of f16 and unpack2x16float 49.9; half of them so 48.6
//   x through workgroup memory 57.7; x kept for 16 rows, sums in workgroup memory 51.4, for 32 58.5
//   x in three or four planes of 8 bits, dot4I8Packed, what is too small beside its block's largest apart: 54 to 135 (a
//     dot takes 2.3 times as long as a multiply-add here, and making the planes costs more than it saves)
// M 1, 4096 x 4096: 7.9.
//! grid = M * ceil(N / (THREADS / LANES_K * ROWS_EACH))
//! row_align = 16
//! x_align = 32

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const THREADS: u32 = 128u;
const LANES_K: u32 = 64u;
const ROWS_EACH: u32 = 8u;  // as many as main has variables for

var<workgroup> partial_sums: array<array<f32, THREADS>, ROWS_EACH>;

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

struct Block {
  a0: vec4<f32>, b0: vec4<f32>, a1: vec4<f32>, b1: vec4<f32>,
  a2: vec4<f32>, b2: vec4<f32>, a3: vec4<f32>, b3: vec4<f32>,
}

fn x_block(at: u32) -> Block {
  return Block(x[at], x[at + 1u], x[at + 2u], x[at + 3u], x[at + 4u], x[at + 5u], x[at + 6u], x[at + 7u]);
}

fn add_block(sum: f32, words: vec4<u32>, x: Block, zero: u32) -> f32 {
  let first = add_eight(add_eight(sum, codes(words.x, zero), x.a0, x.b0), codes(words.y, zero), x.a1, x.b1);
  return add_eight(add_eight(first, codes(words.z, zero), x.a2, x.b2), codes(words.w, zero), x.a3, x.b3);
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let rows_n = THREADS / LANES_K * ROWS_EACH;
  let groups_n = (params.N + rows_n - 1u) / rows_n;
  let index = workgroup.y * workgroups.x + workgroup.x;
  if (index >= params.M * groups_n) { return; }  // uniform in the workgroup
  let m = index % params.M;
  let n0 = (index / params.M) * rows_n;
  let last = params.N - 1u;
  let stride = params.K_packed / 16u;  // vectors from one row of weights to the next
  let blocks = (params.K + 31u) / 32u;  // of 32 columns
  let x0 = m * blocks * 8u;
  let lane = local % LANES_K;
  let n = n0 + local / LANES_K * ROWS_EACH;
  let zero = params.K_packed >> 31u;

  let row0 = min(n + 0u, last) * stride;
  let row1 = min(n + 1u, last) * stride;
  let row2 = min(n + 2u, last) * stride;
  let row3 = min(n + 3u, last) * stride;
  let row4 = min(n + 4u, last) * stride;
  let row5 = min(n + 5u, last) * stride;
  let row6 = min(n + 6u, last) * stride;
  let row7 = min(n + 7u, last) * stride;
  var sum0 = 0.0;
  var sum1 = 0.0;
  var sum2 = 0.0;
  var sum3 = 0.0;
  var sum4 = 0.0;
  var sum5 = 0.0;
  var sum6 = 0.0;
  var sum7 = 0.0;
  if (lane < blocks) {
    var block = lane;
    var words0 = weights[row0 + block];
    var words1 = weights[row1 + block];
    var words2 = weights[row2 + block];
    var words3 = weights[row3 + block];
    var words4 = weights[row4 + block];
    var words5 = weights[row5 + block];
    var words6 = weights[row6 + block];
    var words7 = weights[row7 + block];
    loop {
      let next = min(block + LANES_K, blocks - 1u);
      let these = x_block(x0 + block * 8u);
      let next0 = weights[row0 + next];
      let next1 = weights[row1 + next];
      let next2 = weights[row2 + next];
      let next3 = weights[row3 + next];
      let next4 = weights[row4 + next];
      let next5 = weights[row5 + next];
      let next6 = weights[row6 + next];
      let next7 = weights[row7 + next];
      sum0 = add_block(sum0, words0, these, zero);
      sum1 = add_block(sum1, words1, these, zero);
      sum2 = add_block(sum2, words2, these, zero);
      sum3 = add_block(sum3, words3, these, zero);
      sum4 = add_block(sum4, words4, these, zero);
      sum5 = add_block(sum5, words5, these, zero);
      sum6 = add_block(sum6, words6, these, zero);
      sum7 = add_block(sum7, words7, these, zero);
      block += LANES_K;
      if (block >= blocks) { break; }
      words0 = next0;
      words1 = next1;
      words2 = next2;
      words3 = next3;
      words4 = next4;
      words5 = next5;
      words6 = next6;
      words7 = next7;
    }
  }

  partial_sums[0][local] = sum0;
  partial_sums[1][local] = sum1;
  partial_sums[2][local] = sum2;
  partial_sums[3][local] = sum3;
  partial_sums[4][local] = sum4;
  partial_sums[5][local] = sum5;
  partial_sums[6][local] = sum6;
  partial_sums[7][local] = sum7;
  workgroupBarrier();
  for (var width = LANES_K / 2u; width > 0u; width /= 2u) {
    if (lane < width) {
      partial_sums[0][local] += partial_sums[0][local + width];
      partial_sums[1][local] += partial_sums[1][local + width];
      partial_sums[2][local] += partial_sums[2][local + width];
      partial_sums[3][local] += partial_sums[3][local + width];
      partial_sums[4][local] += partial_sums[4][local + width];
      partial_sums[5][local] += partial_sums[5][local + width];
      partial_sums[6][local] += partial_sums[6][local + width];
      partial_sums[7][local] += partial_sums[7][local + width];
    }
    workgroupBarrier();
  }
  if (local < rows_n && n0 + local < params.N) {
    y[m * params.N + n0 + local] = partial_sums[local % ROWS_EACH][local / ROWS_EACH * LANES_K] * scales[n0 + local];
  }
}
