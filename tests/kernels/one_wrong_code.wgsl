// one_wrong_code: linear_naive, but code (0, 8191) is read one too high. A fault that only the exact probe sees.
//
// Bindings as in linear_naive: 0 y, 1 x, 2 weights, 3 scales, 4 params {M, N, K, K_packed}.
// For the tests: with fewer than 8192 columns it is right.
//! grid = ceil(M * N / WORKGROUP)

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
  let wrong = select(0, 1, n == 0u && k == 8191u);
  return f32(i32(nibble) - 8 + wrong);
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
  for (var k = 0u; k < params.K; k += 1u) {
    sum += x[m * params.K + k] * code_at(n, k);
  }
  y[index] = sum * scales[n];
}
