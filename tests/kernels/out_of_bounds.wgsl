// A kernel with a fault: its last workgroup stores past the end of y.
//! grid = ceil(M * N / WORKGROUP)

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP: u32 = 64u;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let index = (workgroup.y * workgroups.x + workgroup.x) * WORKGROUP + local;
  // The fault: a guard is missing here.
  let m = index / params.N;
  let n = index % params.N;
  var sum = 0.0;
  for (var byte = 0u; byte < params.K_packed; byte += 1u) {
    let at = n * params.K_packed + byte;
    let pair = (weights[at / 4u] >> (8u * (at % 4u))) & 0xFFu;
    let k = 2u * byte;
    sum += x[m * params.K + k] * f32(i32(pair >> 4u) - 8);
    if (k + 1u < params.K) { sum += x[m * params.K + k + 1u] * f32(i32(pair & 0xFu) - 8); }
  }
  y[index] = sum * scales[n];
}
