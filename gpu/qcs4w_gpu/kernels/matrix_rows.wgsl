// matrix_rows: rows of x in f16, for linear_matrix: times a power of two that brings a row's largest into [2^14, 2^15),
// and with PARTS 2 as a high and a low part, whose sum has 21 bits or more.
//
// Bindings:
//   0 parts    array<vec4<u32>>  pairs of f16: (PARTS, N / 16, K' / 16) blocks of 16 rows of 16 columns
//   1 x        array<vec4<f32>>  (M, K')  rows with zeros from K to K' = 2 * K_packed, a multiple of 32
//   3 factors  array<f32>        (M)      the powers of two that undo it; negative where the row is too wide
//   4 params   uniform           M, N rows of `parts` (M rounded up), K, K_packed
// Contract of PARTS 2: a column t, after the multiplication, is off by at most 2^-21 * |t| where its low part is a
// normal f16, and by 2^-24 where it is subnormal; the products are exact in f32, and a tensor core's K' / 8 additions
// are off by 2^-23 each. That keeps the judge's bound, (K + 2) * 2^-24 * sum |x| |w|, for K >= 64 where |t| >= 2 / (K +
// 2) for every t but zero. A row with a smaller one, and every row with a smaller K, is marked by a negative factor,
// and matrix_strict computes it in float32. A high part is cut off in its bits: a compiler may fold a conversion to f16
// and back.
// Contract of PARTS 1: a column is off by 2^-10 * |t|, or by 2^-24; no row is marked.
// One workgroup does a row of `parts`. The grid may be folded.
//! grid = N

enable f16;

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> parts: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> factors: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

override PARTS: u32 = 2u;
const THREADS: u32 = 128u;
const LEAST_NORMAL: f32 = 0.00006103515625;  // 2^-14

var<workgroup> largest: array<f32, THREADS>;
var<workgroup> is_too_wide: atomic<u32>;

fn largest_of(v: vec4<f32>) -> f32 { return max(max(abs(v.x), abs(v.y)), max(abs(v.z), abs(v.w))); }

fn high_part(t: vec4<f32>) -> vec4<f32> {
  let cut = bitcast<vec4<f32>>(bitcast<vec4<u32>>(t) & vec4<u32>(0xFFFFE000u));  // 11 bits
  return select(vec4<f32>(), cut, abs(t) >= vec4<f32>(LEAST_NORMAL));
}

fn eight(a: vec4<f32>, b: vec4<f32>) -> vec4<u32> {
  return vec4<u32>(
    bitcast<u32>(vec2<f16>(a.xy)), bitcast<u32>(vec2<f16>(a.zw)),
    bitcast<u32>(vec2<f16>(b.xy)), bitcast<u32>(vec2<f16>(b.zw)));
}

fn any_small(t: vec4<f32>, limit: f32) -> bool { return any((abs(t) < vec4<f32>(limit)) & (t != vec4<f32>())); }

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let m = workgroup.y * workgroups.x + workgroup.x;
  if (m >= params.N) { return; }  // uniform in the workgroup
  let eights = params.K_packed / 4u;  // of columns
  let source = min(m, params.M - 1u) * eights * 2u;
  var most = 0.0;
  for (var i = local; i < eights * 2u; i += THREADS) { most = max(most, largest_of(x[source + i])); }
  largest[local] = most;
  if (local == 0u) { atomicStore(&is_too_wide, 0u); }
  workgroupBarrier();
  for (var width = THREADS / 2u; width > 0u; width /= 2u) {
    if (local < width) { largest[local] = max(largest[local], largest[local + width]); }
    workgroupBarrier();
  }
  // 2^(14 - e) and 2^(e - 14) for a largest in [2^e, 2^(e + 1)), but 2^120 at most, so that both are normal.
  let exponent = min(268u - (bitcast<u32>(largest[0]) >> 23u), 247u);
  let up = bitcast<f32>(exponent << 23u);
  let down = bitcast<f32>((254u - exponent) << 23u);
  let limit = 2.0 / f32(params.K + 2u);
  let second = params.N * params.K_packed / 4u;
  var is_small = params.K < 64u;
  for (var i = local; i < eights; i += THREADS) {
    let a = select(vec4<f32>(), x[source + i * 2u] * up, m < params.M);
    let b = select(vec4<f32>(), x[source + i * 2u + 1u] * up, m < params.M);
    let to = (m / 16u * (eights / 2u) + i / 2u) * 32u + m % 16u * 2u + i % 2u;
    if (PARTS == 1u) {
      parts[to] = eight(a, b);
    } else {
      is_small = is_small || any_small(a, limit) || any_small(b, limit);
      let high_a = high_part(a);
      let high_b = high_part(b);
      parts[to] = eight(high_a, high_b);
      parts[second + to] = eight(a - high_a, b - high_b);
    }
  }
  if (is_small && PARTS > 1u) { atomicStore(&is_too_wide, 1u); }
  workgroupBarrier();
  if (local == 0u && m < params.M) { factors[m] = select(down, -down, atomicLoad(&is_too_wide) == 1u); }
}
