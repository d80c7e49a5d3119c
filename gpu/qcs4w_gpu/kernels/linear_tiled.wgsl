// linear_tiled: y[m, n] = scales[n] * sum over k of x[m, k] * code(n, k), in tiles through workgroup memory.
//
// Bindings as in linear_naive: 0 y, 1 x, 2 weights, 3 scales, 4 params {M, N, K, K_packed}.
// The host guarantees what linear_naive asks for, and that K_packed is a multiple of 4, so that a row starts
// on a word. What lies between K and the row's end is never multiplied by anything but zero.
// One workgroup computes TILE_M x TILE_N of y, one invocation 4 x 4 of these. The grid may be folded.
//! grid = ceil(M / TILE_M) * ceil(N / TILE_N)
//! row_align = 4

struct Params { M: u32, N: u32, K: u32, K_packed: u32 }

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<uniform> params: Params;

const TILE_M: u32 = 32u;
const TILE_N: u32 = 32u;
const TILE_K: u32 = 32u;
const PER_THREAD: u32 = 4u;                  // rows and columns of y that one invocation computes
const THREADS_N: u32 = TILE_N / PER_THREAD;
const THREADS: u32 = THREADS_N * (TILE_M / PER_THREAD);
const WORDS: u32 = TILE_K / 8u;              // packed words of one row of a weight tile
const STRIDE: u32 = TILE_K + 1u;             // one more than the row, so that columns lie in different banks

var<workgroup> x_tile: array<f32, TILE_M * STRIDE>;  // (TILE_M, TILE_K)
var<workgroup> w_tile: array<f32, TILE_N * STRIDE>;  // (TILE_N, TILE_K), codes

fn nibble_code(word: u32, shift: u32) -> f32 {
  return f32(i32((word >> shift) & 0xFu) - 8);
}

fn x_at(m: u32, k: u32) -> f32 {
  if (m >= params.M || k >= params.K) { return 0.0; }
  return x[m * params.K + k];
}

// Loops take four columns a turn: Mesa's llvmpipe leaves a kernel's loops, unfinished, after 65,535 turns in all.
fn load_x(m0: u32, k0: u32, local: u32) {
  for (var i = local * 4u; i < TILE_M * TILE_K; i += THREADS * 4u) {
    let m = m0 + i / TILE_K;
    let k = k0 + i % TILE_K;
    let at = (i / TILE_K) * STRIDE + i % TILE_K;
    x_tile[at] = x_at(m, k);
    x_tile[at + 1u] = x_at(m, k + 1u);
    x_tile[at + 2u] = x_at(m, k + 2u);
    x_tile[at + 3u] = x_at(m, k + 3u);
  }
}

fn load_weights(n0: u32, k0: u32, local: u32) {
  let row_words = params.K_packed / 4u;
  for (var i = local; i < TILE_N * WORDS; i += THREADS) {
    let n = n0 + i / WORDS;
    let word_index = k0 / 8u + i % WORDS;
    var word = 0x88888888u;  // eight codes of zero
    if (n < params.N && word_index < row_words) { word = weights[n * row_words + word_index]; }
    let at = (i / WORDS) * STRIDE + (i % WORDS) * 8u;
    for (var byte = 0u; byte < 4u; byte += 1u) {
      w_tile[at + byte * 2u] = nibble_code(word, byte * 8u + 4u);
      w_tile[at + byte * 2u + 1u] = nibble_code(word, byte * 8u);
    }
  }
}

// Adds the products of column k of the tiles. One vector per row of y; its components are the columns
// thread_n + 0, 1, 2, 3 * THREADS_N.
fn multiply(sums: ptr<function, array<vec4<f32>, 4>>, thread_m: u32, thread_n: u32, k: u32) {
  let codes = vec4<f32>(
    w_tile[thread_n * STRIDE + k],
    w_tile[(thread_n + THREADS_N) * STRIDE + k],
    w_tile[(thread_n + 2u * THREADS_N) * STRIDE + k],
    w_tile[(thread_n + 3u * THREADS_N) * STRIDE + k],
  );
  for (var i = 0u; i < PER_THREAD; i += 1u) {
    (*sums)[i] += x_tile[(thread_m * PER_THREAD + i) * STRIDE + k] * codes;
  }
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) local: u32,
) {
  let tiles_n = (params.N + TILE_N - 1u) / TILE_N;
  let tiles_m = (params.M + TILE_M - 1u) / TILE_M;
  let tile = workgroup.y * workgroups.x + workgroup.x;
  if (tile >= tiles_m * tiles_n) { return; }  // uniform in the workgroup
  let m0 = (tile / tiles_n) * TILE_M;
  let n0 = (tile % tiles_n) * TILE_N;
  let thread_m = local / THREADS_N;
  let thread_n = local % THREADS_N;

  var sums = array<vec4<f32>, 4>();
  for (var k0 = 0u; k0 < params.K; k0 += TILE_K) {
    load_x(m0, k0, local);
    load_weights(n0, k0, local);
    workgroupBarrier();
    for (var k = 0u; k < TILE_K; k += 4u) {
      multiply(&sums, thread_m, thread_n, k);
      multiply(&sums, thread_m, thread_n, k + 1u);
      multiply(&sums, thread_m, thread_n, k + 2u);
      multiply(&sums, thread_m, thread_n, k + 3u);
    }
    workgroupBarrier();
  }

  for (var i = 0u; i < PER_THREAD; i += 1u) {
    let m = m0 + thread_m * PER_THREAD + i;
    if (m >= params.M) { break; }
    for (var j = 0u; j < PER_THREAD; j += 1u) {
      let n = n0 + thread_n + j * THREADS_N;
      if (n < params.N) { y[m * params.N + n] = sums[i][j] * scales[n]; }
    }
  }
}
