// linear_naive: y[m, n] = scales[n] * sum over k of x[m, k] * code(n, k). The readable truth; one sum per invocation.
//
// Bindings, as in ExecuTorch's et_vk.linear_qcs4w:
//   0 y        array<f32>  (M, N)         written, every element
//   1 x        array<f32>  (M, K)         finite
//   2 weights  array<u32>  (N, K_packed)  bytes; byte i lies in bits 8 * (i mod 4) of word i div 4.
//                                         Even column in the high nibble, odd column in the low one, code + 8.
//   3 scales   array<f32>  (N)            finite
//   4 params   uniform     M, N, K, K_packed (bytes from one row to the next)
// The host guarantees: M, N, K >= 1; M * N, M * K and N * K_packed below 2^32.
// One invocation computes one y. The grid may be folded: workgroups are counted along x first, then y.
//! grid = ceil(M * N / WORKGROUP)
//! row_align = 1

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP: u32 = 64u;

fn code_at(n: u32, k: u32) -> f32 {
  let byte_index = n * params.K_packed + k / 2u;
  let pair = weights[byte_index / 4u] >> (8u * (byte_index % 4u));
  let nibble = select(pair, pair >> 4u, k % 2u == 0u) & 0xFu;
  return f32(i32(nibble) - 8);  // signed before the offset comes off: u32 would wrap
}

fn product_at(m: u32, n: u32, k: u32) -> f32 {
  if (k >= params.K) { return 0.0; }
  return x[m * params.K + k] * code_at(n, k);
}

fn sum_of_four(m: u32, n: u32, k: u32) -> f32 {
  return product_at(m, n, k) + product_at(m, n, k + 1u) + product_at(m, n, k + 2u) + product_at(m, n, k + 3u);
}

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let index = (workgroup.y * workgroups.x + workgroup.x) * WORKGROUP + local;
  if (index >= params.M * params.N) { return; }
  let m = index / params.N;
  let n = index % params.N;
  var sum = 0.0;
  // Sixteen columns a turn: Mesa's llvmpipe leaves any loop, unfinished, after 65,535 turns.
  for (var k = 0u; k < params.K; k += 16u) {
    sum += sum_of_four(m, n, k) + sum_of_four(m, n, k + 4u) + sum_of_four(m, n, k + 8u) + sum_of_four(m, n, k + 12u);
  }
  y[index] = sum * scales[n];
}
