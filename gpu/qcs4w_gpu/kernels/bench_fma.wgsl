// bench_fma: long chains of fused multiply-adds in registers, to see how many the device does in a second: the ceiling
// of every kernel that computes in float32. It also warms a device up, and shows whether its clock has changed.
//
// Bindings:
//   0 y       array<f32>  (WORKGROUP * workgroups)  written
//   1 x       array<f32>  (2)                       the factor and the addend; 1 and 0 keep the numbers small
//   4 params  uniform     M workgroups, K turns of 64 multiply-adds an invocation; N and K_packed are not used
//! grid = M

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const WORKGROUP: u32 = 256u;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
  let factor = vec4<f32>(x[0]);
  let addend = vec4<f32>(x[1]);
  var a = vec4<f32>(f32(local));
  var b = a + 1.0;
  var c = a + 2.0;
  var d = a + 3.0;
  for (var turn = 0u; turn < params.K; turn += 1u) {
    a = fma(a, factor, addend); b = fma(b, factor, addend); c = fma(c, factor, addend); d = fma(d, factor, addend);
    a = fma(a, factor, addend); b = fma(b, factor, addend); c = fma(c, factor, addend); d = fma(d, factor, addend);
    a = fma(a, factor, addend); b = fma(b, factor, addend); c = fma(c, factor, addend); d = fma(d, factor, addend);
    a = fma(a, factor, addend); b = fma(b, factor, addend); c = fma(c, factor, addend); d = fma(d, factor, addend);
  }
  y[workgroup.x * WORKGROUP + local] = dot(a + b + c + d, vec4<f32>(1.0));
}
