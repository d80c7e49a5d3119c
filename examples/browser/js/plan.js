/** With how many workgroups a kernel runs, and whether it fits the device: pure arithmetic, no WebGPU in here. */

import { PageError } from "./errors.js";
import { workgroups } from "./kernel.js";
import { packedWidth } from "./nibbles.js";
import { count } from "./text.js";

const U32_RANGE = 2 ** 32;
// Larger than this no browser hands out as one array, whatever the GPU takes.
const MOST_IN_MEMORY = 2 ** 31 - 1;

/**
 * @typedef {object} Plan
 * @property {{M: number, N: number, K: number, K_packed: number}} sizes as the kernel's Params
 * @property {[number, number]} grid workgroups along x and y
 */

/**
 * Return the bytes from one packed row to the next: ceil(K / 2), rounded up to what all of these kernels ask for, so
 * that they can share the weights.
 * @param {number} inFeatures K
 * @param {readonly import("./kernel.js").Kernel[]} kernels
 */
export function rowStride(inFeatures, kernels) {
  const align = kernels.reduce((all, { rowAlign }) => (all / divisor(all, rowAlign)) * rowAlign, 1);
  return Math.ceil(packedWidth(inFeatures) / align) * align;
}

/**
 * Plan y[M, N] = x[M, K] · Ŵ[N, K]ᵀ.
 * @param {import("./kernel.js").Kernel} kernel
 * @param {{M: number, N: number, K: number, K_packed: number}} sizes K_packed as the kernel sees it
 * @param {GPUSupportedLimits} limits of the device
 * @returns {Plan}
 * @throws {PageError} a buffer or the grid is beyond the device's limits
 */
export function planLinear(kernel, sizes, limits) {
  const { M, N, K, K_packed } = sizes;
  for (const [what, nbytes] of /** @type {[string, number][]} */ ([
    [`packed weights (N ${count(N)} × ${count(K_packed)} bytes)`, N * K_packed],
    [`x (M ${count(M)} × K ${count(K)} in float32)`, M * K * 4],
    [`y (M ${count(M)} × N ${count(N)} in float32)`, M * N * 4],
  ])) {
    const [limit, most] = smallest([
      ["maxStorageBufferBindingSize", limits.maxStorageBufferBindingSize],
      ["maxBufferSize", limits.maxBufferSize],
      ["largest array of a browser", MOST_IN_MEMORY],
    ]);
    if (nbytes > most) {
      throw new PageError(
        `${what} needs ${count(nbytes)} bytes in one buffer, this browser's ${limit} is ${count(most)}`,
        "Fewer rows help where x or y is too large; for the weights use the command line: qcs4w verify FILE.",
      );
    }
  }
  for (const [what, elements] of /** @type {[string, number][]} */ ([
    ["M · N", M * N],
    ["M · K", M * K],
    ["N · K_packed", N * K_packed],
  ])) {
    if (elements >= U32_RANGE)
      throw new PageError(`${what} is ${count(elements)}, beyond the 32 bits of an index in WGSL`);
  }
  return { sizes, grid: foldGrid(workgroups(kernel, sizes), limits.maxComputeWorkgroupsPerDimension) };
}

/**
 * Fold a line of workgroups into x × y, each within the device's limit, with as few too many as can be.
 * @param {number} total
 * @param {number} limit
 * @returns {[number, number]}
 */
export function foldGrid(total, limit) {
  const y = Math.max(1, Math.ceil(total / limit));
  if (y > limit)
    throw new PageError(`${count(total)} workgroups exceed ${count(limit)} × ${count(limit)}`, "Use fewer rows.");
  return [Math.max(1, Math.ceil(total / y)), y];
}

/** @param {[string, number][]} limits */
function smallest(limits) {
  return limits.reduce((least, limit) => (limit[1] < least[1] ? limit : least));
}

/** @param {number} a @param {number} b @returns {number} the greatest common one */
function divisor(a, b) {
  return b ? divisor(b, a % b) : a;
}
