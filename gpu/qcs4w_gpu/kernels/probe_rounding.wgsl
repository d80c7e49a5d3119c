// probe_rounding: sums[i] = a[i] + b[i], products[i] = a[i] * b[i], to see how an adapter rounds.
//
// WGSL lets + and * round to either neighbour; the judge's bound doubles where an adapter does not round to nearest.
// Bindings:
//   0 results  array<f32>  (2, M)  sums, then products
//   1 a        array<f32>  (M)
//   2 b        array<f32>  (M)
//   4 params   uniform     M; N, K and K_packed are not used
//! grid = ceil(M / WORKGROUP)

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> results: array<f32>;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP: u32 = 64u;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= params.M) { return; }
  results[id.x] = a[id.x] + b[id.x];
  results[params.M + id.x] = a[id.x] * b[id.x];
}
