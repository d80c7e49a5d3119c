// bias_add: y[m, n] += bias[n], after the linear, as ExecuTorch does it in an operator of its own.
//
// Bindings:
//   0 y       array<f32>  (M, N)  read and written
//   1 bias    array<f32>  (N)
//   4 params  uniform     M, N; K and K_packed are not used
// One invocation adds to one y. The grid may be folded.
//! grid = ceil(M * N / WORKGROUP)

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP: u32 = 64u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let index = (workgroup.y * workgroups.x + workgroup.x) * WORKGROUP + local;
  if (index < params.M * params.N) { y[index] += bias[index % params.N]; }
}
