/** The GPU's linear against the judge, by the two probes of `qcs4w verify`, for each kernel in turn. */

import { wrongDigests, CAN_DIGEST } from "./digest.js";
import { PageError } from "./errors.js";
import { checkDomain, compare, exactInput, reference } from "./judge.js";
import { shippedKernel, workgroups } from "./kernel.js";
import { Linear } from "./linear.js";
import { foldGrid, planLinear, rowStride } from "./plan.js";
import { generator, nearlyNormal } from "./random.js";
import { shown } from "./text.js";

const EXACT_ROWS = 4;
const PROBE_COUNT = 1024;

/**
 * What was found of one kernel.
 * @typedef {object} KernelResult
 * @property {string} kernel
 * @property {import("./judge.js").Comparison} exact integer inputs, scales of 1: equality is demanded
 * @property {import("./judge.js").Comparison} bounded real scales and input, against the bound of float32
 * @property {import("./linear.js").Timing | null} timing null for a kernel that is wrong
 * @property {Float32Array} y of the bounded probe, M · N
 */

/**
 * @typedef {object} Verdict
 * @property {boolean} isMatch all kernels are right
 * @property {KernelResult[]} results
 * @property {import("./judge.js").Reference} wanted of the bounded probe
 * @property {1 | 2} factor c of the bound: 1 where the adapter rounds to nearest
 */

/**
 * Judge kernels on one weight. The plan comes first, so that what cannot fit is known before gigabytes are read.
 * @param {import("./gpu.js").Gpu} gpu
 * @param {import("./container.js").PackedEntry} entry
 * @param {(progress: import("./progress.js").Progress) => Promise<import("./container.js").Weight>} load
 * @param {import("./kernel.js").Kernel[]} kernels
 * @param {import("./input.js").Input} input
 * @param {number} seed of the exact probe
 * @param {import("./progress.js").Progress} progress
 * @returns {Promise<Verdict>}
 * @throws {PageError} it could not be done; a wrong y is no error but a verdict
 */
export async function verify(gpu, entry, load, kernels, input, seed, progress) {
  const { outFeatures: N, inFeatures: K } = entry;
  const stride = rowStride(K, kernels);
  const xExact = exactInput(K, EXACT_ROWS, seed);
  const sizes = { N, K, K_packed: stride };
  const plans = kernels.map((kernel) => ({
    kernel,
    bounded: planLinear(kernel, { M: input.values.length / K, ...sizes }, gpu.limits),
    exact: planLinear(kernel, { M: xExact.length / K, ...sizes }, gpu.limits),
  }));

  await progress.part("Reading the weight");
  const weight = await load(progress);
  await checkWeight(weight);
  checkDomain(weight, input.values);
  const factor = await gpu.checked("probing how the adapter rounds", () => roundingFactor(gpu));

  await progress.part("Integer probe: the float64 product");
  const wantedExact = await reference(weight, xExact, 0, progress, { unitScales: true });
  await progress.part("Bounded probe: the float64 product");
  const wanted = await reference(weight, input.values, factor, progress);

  const linear = await gpu.checked("making room for the weight", async () => new Linear(gpu, weight, stride));
  try {
    await progress.part("Uploading the weight");
    await gpu.checked("uploading the weight", () => linear.upload(progress));
    const results = [];
    for (const { kernel, exact, bounded } of plans) {
      await progress.part(`Running ${shown(kernel.name)}`);
      const where = `kernel '${shown(kernel.name)}' (M ${bounded.sizes.M}, N ${N}, K ${K})`;
      const exactRun = await gpu.checked(where, () => linear.run(kernel, exact, xExact, { unitScales: true }));
      const boundedRun = await gpu.checked(where, () => linear.run(kernel, bounded, input.values));
      const compared = { exact: compare(exactRun, wantedExact, N), bounded: compare(boundedRun, wanted, N) };
      progress.check();
      const isRight = compared.exact.isMatch && compared.bounded.isMatch;
      const timing = isRight ? await gpu.checked(where, () => linear.time(kernel, bounded, input.values)) : null;
      results.push({ kernel: kernel.name, ...compared, timing, y: boundedRun.y });
    }
    return {
      isMatch: results.every(({ exact, bounded }) => exact.isMatch && bounded.isMatch),
      results,
      wanted,
      factor,
    };
  } finally {
    linear.destroy();
  }
}

/**
 * Check what no kernel may be given: damaged bytes, and scales that are no numbers.
 * @param {import("./container.js").Weight} weight
 */
async function checkWeight(weight) {
  const wrong = CAN_DIGEST ? await wrongDigests(weight) : [];
  if (wrong.length) {
    throw new PageError(
      wrong.join("; "),
      "The file was damaged or edited after packing: pack it again. It can be looked at here, but is not run.",
    );
  }
  const row = weight.scales.findIndex((scale) => !Number.isFinite(scale));
  if (row >= 0) throw new PageError(`the scale of row ${row} is ${weight.scales[row]}, expected a finite number`);
}

/**
 * Return 1 where the adapter rounds sums and products to nearest, else 2: WGSL permits either.
 * @param {import("./gpu.js").Gpu} gpu
 * @returns {Promise<1 | 2>}
 */
async function roundingFactor(gpu) {
  const kernel = await shippedKernel("probe_rounding");
  const draw = generator(0);
  const a = nearlyNormal(PROBE_COUNT, draw);
  const b = nearlyNormal(PROBE_COUNT, draw).map((value) => value * 2 ** (Math.floor(draw() * 24) - 20));
  const sizes = { M: PROBE_COUNT, N: 1, K: 1, K_packed: 1 };
  const buffers = new Map([
    [0, gpu.upload(new Float32Array(2 * PROBE_COUNT), "rounding probe")],
    [1, gpu.upload(a, "a")],
    [2, gpu.upload(b, "b")],
  ]);
  try {
    const [results] = buffers.values();
    const grid = foldGrid(workgroups(kernel, sizes), gpu.limits.maxComputeWorkgroupsPerDimension);
    const dispatch = await gpu.prepare(kernel, buffers, { sizes, grid });
    const encoder = gpu.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    dispatch(pass);
    pass.end();
    gpu.device.queue.submit([encoder.finish()]);
    const seen = new Float32Array((await gpu.read(results)).buffer);
    // Float64 holds a product of two float32 exactly, and a sum well enough for a second rounding to change nothing.
    const isNearest = a.every(
      (v, i) => seen[i] === Math.fround(v + b[i]) && seen[PROBE_COUNT + i] === Math.fround(v * b[i]),
    );
    return isNearest ? 1 : 2;
  } finally {
    for (const buffer of buffers.values()) buffer.destroy();
  }
}
