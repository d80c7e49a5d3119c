/**
 * The judge: is y right? A float64 product of the same dequantized weights, the bound on what float32 may differ, and
 * a comparison. The bound is the one that gpu/qcs4w_gpu/judge.py derives:
 *
 *   |y − y64| ≤ c · (K + 2) · 2⁻²⁴ · Σ|x_k·ŵ_k|  +  2⁻¹²⁶ · (Σ|ŵ_k| + 8·Σ|x_k| + (K + 2) · max(1, |scale|))
 *
 * The bytes are read here by code of its own: it shares nothing with the dump or with the kernels, so that one mistake
 * cannot hide in both. No WebGPU in here.
 */

import { PageError } from "./errors.js";
import { generator, smallIntegers } from "./random.js";
import { general } from "./text.js";

const UNIT = 2 ** -24;
const TINY = 2 ** -126;

/** Up to this K every sum of the exact probe stays below 2²⁴, so that float32 has no rounding to do. */
const EXACT_WINDOW = 524_288;

/**
 * What y should be.
 * @typedef {object} Reference
 * @property {Float64Array} y M · N
 * @property {Float64Array} bound M · N, the largest |y − y64| that float32 arithmetic can explain
 */

/** @typedef {{row: number, column: number, value: number, expected: number, error: number, bound: number}} Element */

/**
 * @typedef {object} Comparison
 * @property {number} elements
 * @property {number} failures elements beyond their bound, NaN included
 * @property {Element} worst the one with the largest error in units of its bound
 * @property {number} unwritten elements that the kernel never wrote
 * @property {boolean} guardsIntact nothing was written behind y
 * @property {boolean} isMatch
 */

/**
 * Compute x · Ŵᵀ in float64 with its bound.
 * @param {import("./container.js").Weight} weight
 * @param {Float32Array} x M · K
 * @param {number} factor c of the bound: 1 or 2; 0 demands equality, for the exact probe
 * @param {import("./progress.js").Progress} progress
 * @param {{unitScales?: boolean}} [options] unitScales: 1 in place of every scale
 * @returns {Promise<Reference>}
 */
export async function reference(weight, x, factor, progress, { unitScales = false } = {}) {
  const { packed, scales } = weight;
  const { outFeatures: N, inFeatures: K, width } = weight.entry;
  const M = x.length / K;
  const wide = Float64Array.from(x);
  const xSums = Float64Array.from({ length: M }, (_, m) =>
    wide.subarray(m * K, (m + 1) * K).reduce((sum, v) => sum + Math.abs(v), 0),
  );
  const y = new Float64Array(M * N);
  const bound = new Float64Array(M * N);
  const row = new Float64Array(K);
  for (let n = 0; n < N; n++) {
    const scale = unitScales ? 1 : scales[n];
    let wSum = 0;
    for (let k = 0; k < K; k++) {
      const byte = packed[n * width + Math.floor(k / 2)];
      const sixteens = Math.floor(byte / 16); // of the even column; what is left over is of the odd one
      row[k] = ((k % 2 === 0 ? sixteens : byte - 16 * sixteens) - 8) * scale;
      wSum += Math.abs(row[k]);
    }
    for (let m = 0; m < M; m++) {
      if (progress.isDue) await progress.step(n * M + m, N * M);
      let sum = 0;
      let absolute = 0;
      for (let k = 0, at = m * K; k < K; k++, at++) {
        const product = wide[at] * row[k];
        sum += product;
        absolute += Math.abs(product);
      }
      const flushed = TINY * (wSum + 8 * xSums[m] + (K + 2) * Math.max(1, Math.abs(scale)));
      y[m * N + n] = sum;
      bound[m * N + n] = factor && factor * (K + 2) * UNIT * absolute + flushed;
    }
  }
  return { y, bound };
}

/**
 * Check that no intermediate result can overflow float32.
 * @param {import("./container.js").Weight} weight
 * @param {Float32Array} x
 * @throws {PageError}
 */
export function checkDomain({ entry, scales }, x) {
  const largest = (/** @type {Float32Array} */ values) =>
    values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const [xMost, scaleMost] = [largest(x), largest(scales)];
  const reach = 8 * entry.inFeatures * xMost * Math.max(1, scaleMost);
  if (reach < 2 ** 127) return;
  throw new PageError(
    `x up to ${general(xMost, 3)} with K ${entry.inFeatures} and scales up to ${general(scaleMost, 3)} can overflow ` +
      `float32: 8 · K · max|x| · max(1, scale) is ${general(reach, 3)}, it must stay below 2^127 (1.70e+38)`,
    "Scale the input down.",
  );
}

/**
 * Return rows of small non-zero integers for which every sum is exact in float32; beyond EXACT_WINDOW columns a row
 * covers one window of K and is zero elsewhere.
 * @param {number} inFeatures K
 * @param {number} rows of each window
 * @param {number} seed
 */
export function exactInput(inFeatures, rows, seed) {
  const x = smallIntegers(rows * inFeatures, generator(seed));
  const windows = Math.ceil(inFeatures / EXACT_WINDOW);
  if (windows === 1) return x;
  const parts = new Float32Array(windows * rows * inFeatures);
  for (let row = 0; row < windows * rows; row++) {
    const first = Math.floor(row / rows) * EXACT_WINDOW;
    const from = (row % rows) * inFeatures;
    parts.set(x.subarray(from + first, from + Math.min(first + EXACT_WINDOW, inFeatures)), row * inFeatures + first);
  }
  return parts;
}

/**
 * Compare y with what it should be.
 * @param {{y: Float32Array, unwritten: number, guardsIntact: boolean}} run
 * @param {Reference} wanted
 * @param {number} outFeatures N
 * @returns {Comparison}
 */
export function compare({ y, unwritten, guardsIntact }, wanted, outFeatures) {
  let failures = 0;
  let worst = -1;
  let [worstExcess, worstError] = [-1, -1];
  for (let i = 0; i < y.length; i++) {
    const difference = Math.abs(y[i] - wanted.y[i]);
    const error = Number.isNaN(difference) ? Infinity : difference;
    if (error > wanted.bound[i]) failures++;
    const excess = error > 0 ? error / wanted.bound[i] : 0;
    if (excess > worstExcess || (excess === worstExcess && error >= worstError)) {
      [worst, worstExcess, worstError] = [i, excess, error];
    }
  }
  return {
    elements: y.length,
    failures,
    worst: {
      row: Math.floor(worst / outFeatures),
      column: worst % outFeatures,
      value: y[worst],
      expected: wanted.y[worst],
      error: worstError,
      bound: wanted.bound[worst],
    },
    unwritten,
    guardsIntact,
    isMatch: failures === 0 && unwritten === 0 && guardsIntact,
  };
}
