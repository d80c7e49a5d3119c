// matrix_weights: codes in f16, in which they are exact, for linear_matrix.
//
// Bindings:
//   0 blocks   array<vec4<u32>>  pairs of f16: (M / 16, K' / 16) blocks of 16 rows of 16 columns
//   2 weights  array<vec2<u32>>  (N, K_packed) bytes as in linear_naive, K_packed the least multiple of 16,
//     codes of zero
//                                from K on
//   4 params   uniform           M rows of `blocks` (N rounded up), N, K, K_packed (K' = 2 * K_packed)
// One invocation does 16 columns of a row, neighbours the 16 rows of a block, which they write together: 80
// microseconds for 8192 x 8192 on an NVIDIA H200, while neighbours along K, which read together, take 207. The grid may
// be folded.
//! grid = ceil(M * (K_packed / 8) / THREADS)
//! row_align = 16

enable f16;

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> blocks: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> weights: array<vec2<u32>>;
@group(0) @binding(4) var<uniform> params: Params;

const THREADS: u32 = 256u;

fn less_eight(pair: u32) -> u32 {  // 1024 + code + 8 in each half, less 1032
  return bitcast<u32>(bitcast<vec2<f16>>(pair) - vec2<f16>(1032.0h));
}

fn eight(word: u32) -> vec4<u32> {
  let odd = word & 0x0F0F0F0Fu;
  let even = (word >> 4u) & 0x0F0F0F0Fu;
  let pairs = vec4<u32>(
    (even & 0xFu) | ((odd & 0xFu) << 16u),
    ((even >> 8u) & 0xFu) | ((odd & 0xF00u) << 8u),
    ((even >> 16u) & 0xFu) | (odd & 0xF0000u),
    (even >> 24u) | ((odd >> 8u) & 0xF0000u),
  ) | vec4<u32>(0x64006400u);
  return vec4<u32>(less_eight(pairs.x), less_eight(pairs.y), less_eight(pairs.z), less_eight(pairs.w));
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let at = (workgroup.y * workgroups.x + workgroup.x) * THREADS + local;
  let ks = params.K_packed / 8u;  // blocks along K
  if (at >= params.M * ks) { return; }
  let n = at / 16u / ks * 16u + at % 16u;
  let words = select(vec2<u32>(0x88888888u), weights[min(n, params.N - 1u) * ks + at / 16u % ks], n < params.N);
  blocks[at * 2u] = eight(words.x);
  blocks[at * 2u + 1u] = eight(words.y);
}
