// A kernel to start from: y[m, n] = scales[n] * sum over k of x[m, k] * (nibble(n, k) - 8).
// Judge it, and whatever you make of it: qcs4w verify packed.safetensors --kernel my_kernel.wgsl
//
// The line that begins with //! is for the host: how many workgroups to run, from M, N, K, K_packed and the constants
// of this file. They are folded into two dimensions where there are more than the device takes in one. A line
// `//! row_align = 16` would have the rows of weights padded to 16 bytes, and K_packed say so.
//
// Keep stores below M * N by Params: behind y, in the same binding, lie words that must stay as they are, so that
// arrayLength(&y) is larger than M * N. A runtime may bind y to a part of a larger buffer as well.
//! grid = ceil(M * N / WORKGROUP)

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;       // (M, N)
@group(0) @binding(1) var<storage, read> x: array<f32>;             // (M, K)
@group(0) @binding(2) var<storage, read> weights: array<u32>;       // (N, K_packed) bytes
@group(0) @binding(3) var<storage, read> scales: array<f32>;        // (N)
@group(0) @binding(4) var<uniform> params: Params;

override WORKGROUP: u32 = 64u;  // another by --define WORKGROUP=128

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
  for (var byte = 0u; byte < params.K_packed; byte += 1u) {
    let at = n * params.K_packed + byte;
    let pair = (weights[at / 4u] >> (8u * (at % 4u))) & 0xFFu;
    let k = 2u * byte;
    sum += x[m * params.K + k] * f32(i32(pair >> 4u) - 8);                                 // even column: high nibble
    if (k + 1u < params.K) { sum += x[m * params.K + k + 1u] * f32(i32(pair & 0xFu) - 8); }  // odd column: low nibble
  }
  y[index] = sum * scales[n];
}
