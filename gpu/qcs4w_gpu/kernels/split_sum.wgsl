// split_sum: y[m, n] = scales[n] * sum over p of sums[p, m, n], after a kernel that has summed parts of K apart.
//
// Bindings:
//   0 y       array<f32>  (M, N)     written, every element
//   1 sums    array<f32>  (K, M, N)  of the K parts, unscaled
//   3 scales  array<f32>  (N)
//   4 params  uniform     M, N, K parts; K_packed is not used
// One invocation computes one y. The grid may be folded.
//! grid = ceil(M * N / WORKGROUP)

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> sums: array<f32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP: u32 = 256u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let index = (workgroup.y * workgroups.x + workgroup.x) * WORKGROUP + local;
  let count = params.M * params.N;
  if (index >= count) { return; }
  var sum = sums[index];
  for (var part = 1u; part < params.K; part += 1u) { sum += sums[part * count + index]; }
  y[index] = sum * scales[index % params.N];
}
