// bench_copy: y[i] = x[i], to see how many bytes a second the device moves: the ceiling of every kernel that waits for
// its weights.
//
// Bindings:
//   0 y       array<vec4<f32>>  (M)  written
//   1 x       array<vec4<f32>>  (M)
//   4 params  uniform           M, in vectors of 16 bytes; N, K and K_packed are not used
// One invocation copies EACH vectors, a workgroup's width apart. The grid may be folded.
//! grid = ceil(M / (WORKGROUP * EACH))

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP: u32 = 256u;
const EACH: u32 = 4u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let at = (workgroup.y * workgroups.x + workgroup.x) * WORKGROUP * EACH + local;
  if (at + 3u * WORKGROUP >= params.M) { return; }
  let a = x[at];
  let b = x[at + WORKGROUP];
  let c = x[at + 2u * WORKGROUP];
  let d = x[at + 3u * WORKGROUP];
  y[at] = a;
  y[at + WORKGROUP] = b;
  y[at + 2u * WORKGROUP] = c;
  y[at + 3u * WORKGROUP] = d;
}
