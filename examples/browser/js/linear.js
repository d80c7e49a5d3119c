/** A packed linear on a device: weights are uploaded once, and run many times. */

import { PAD_BYTE } from "./nibbles.js";

/** A quiet NaN that no computation makes: what stands in y before a kernel runs, and in guard words behind it. */
const POISON = 0x7fc0dead;
const GUARD_WORDS = 64;
const CHUNK = 16 * 2 ** 20;

// A batch of dispatches lasts so long that browsers' coarse clocks (0.1 ms, on purpose) hardly matter.
const BATCH_MS = 20;
const MOST_REPEATS = 200;
const BATCHES = 5;
const TIMING_BUDGET_MS = 500;

/**
 * @typedef {object} Run
 * @property {Float32Array} y M · N
 * @property {number} unwritten how many elements the kernel never wrote
 * @property {boolean} guardsIntact nothing was written behind y
 */

/**
 * @typedef {object} Timing
 * @property {number} ms of one dispatch, the median of some batches
 * @property {number} dispatches in all batches together
 * @property {"gpu" | "wall"} clock the GPU's own, or from submitting to the browser's word that it is done
 */

export class Linear {
  #gpu;
  #weight;
  #weights;
  #scales;
  #ones;

  /**
   * Upload a weight; free it with `destroy`.
   * @param {import("./gpu.js").Gpu} gpu
   * @param {import("./container.js").Weight} weight
   * @param {number} stride bytes from one row to the next
   */
  constructor(gpu, weight, stride) {
    this.#gpu = gpu;
    this.#weight = weight;
    this.#weights = gpu.buffer(
      weight.entry.outFeatures * stride,
      GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST,
      "packed weights",
    );
    this.#scales = gpu.upload(weight.scales, "scales");
    this.#ones = gpu.upload(new Float32Array(weight.scales.length).fill(1), "scales of 1");
    this.stride = stride;
  }

  /** Upload the packed rows, padded with codes of zero to the stride. @param {import("./progress.js").Progress} progress */
  async upload(progress) {
    const { packed, entry } = this.#weight;
    // Writes begin and end at multiples of 4 bytes, whatever the stride is.
    const rows = Math.max(4, Math.floor(CHUNK / this.stride / 4) * 4);
    for (let first = 0; first < entry.outFeatures; first += rows) {
      await progress.step(first, entry.outFeatures);
      const last = Math.min(first + rows, entry.outFeatures);
      const piece = new Uint8Array(Math.ceil(((last - first) * this.stride) / 4) * 4).fill(PAD_BYTE);
      for (let n = first; n < last; n++) {
        piece.set(packed.subarray(n * entry.width, (n + 1) * entry.width), (n - first) * this.stride);
      }
      this.#gpu.device.queue.writeBuffer(this.#weights, first * this.stride, piece);
    }
  }

  /**
   * Run a kernel once, with what a careful caller wants to know.
   * @param {import("./kernel.js").Kernel} kernel
   * @param {import("./plan.js").Plan} plan
   * @param {Float32Array} x M · K
   * @param {{unitScales?: boolean}} [options] unitScales: 1 in place of every scale
   * @returns {Promise<Run>}
   */
  async run(kernel, plan, x, { unitScales = false } = {}) {
    return this.#with(kernel, plan, x, unitScales, async (dispatch, yBuffer) => {
      this.#submit(dispatch, 1);
      const words = await this.#gpu.read(yBuffer);
      const elements = plan.sizes.M * plan.sizes.N;
      return {
        y: new Float32Array(words.buffer, 0, elements),
        unwritten: words.subarray(0, elements).filter((word) => word === POISON).length,
        guardsIntact: words.subarray(elements).every((word) => word === POISON),
      };
    });
  }

  /**
   * Time a kernel that has run before: so that nothing is compiled, and only what was found right is timed.
   * @param {import("./kernel.js").Kernel} kernel
   * @param {import("./plan.js").Plan} plan
   * @param {Float32Array} x
   * @returns {Promise<Timing>}
   */
  async time(kernel, plan, x) {
    return this.#with(kernel, plan, x, false, async (dispatch) => {
      const one = await this.#batch(dispatch, 1);
      const repeats = Math.min(MOST_REPEATS, Math.max(1, Math.ceil(BATCH_MS / Math.max(one.ms, 0.05))));
      const batches = Math.min(BATCHES, Math.max(1, Math.floor(TIMING_BUDGET_MS / (one.ms * repeats + 1))));
      const seen = [];
      for (let i = 0; i < batches; i++) seen.push(await this.#batch(dispatch, repeats));
      const clock = seen.every((batch) => batch.clock === "gpu") ? "gpu" : "wall";
      const times = seen.map((batch) => (clock === "gpu" ? batch.ms : batch.wallMs) / repeats).sort((a, b) => a - b);
      return { ms: times[Math.floor(times.length / 2)], dispatches: batches * repeats, clock };
    });
  }

  /** Free what is on the device. */
  destroy() {
    for (const buffer of [this.#weights, this.#scales, this.#ones]) buffer.destroy();
  }

  /**
   * @template T
   * @param {import("./kernel.js").Kernel} kernel
   * @param {import("./plan.js").Plan} plan
   * @param {Float32Array} x
   * @param {boolean} unitScales
   * @param {(dispatch: (pass: GPUComputePassEncoder) => void, y: GPUBuffer) => Promise<T>} work
   */
  async #with(kernel, plan, x, unitScales, work) {
    const y = this.#gpu.upload(new Uint32Array(plan.sizes.M * plan.sizes.N + GUARD_WORDS).fill(POISON), "y");
    const xBuffer = this.#gpu.upload(x, "x");
    const buffers = new Map([
      [0, y],
      [1, xBuffer],
      [2, this.#weights],
      [3, unitScales ? this.#ones : this.#scales],
    ]);
    try {
      return await work(await this.#gpu.prepare(kernel, buffers, plan), y);
    } finally {
      y.destroy();
      xBuffer.destroy();
    }
  }

  /**
   * @param {(pass: GPUComputePassEncoder) => void} dispatch
   * @param {number} repeats
   * @param {GPUComputePassTimestampWrites} [timestampWrites]
   * @param {(encoder: GPUCommandEncoder) => void} [andThen]
   */
  #submit(dispatch, repeats, timestampWrites, andThen) {
    const encoder = this.#gpu.device.createCommandEncoder();
    const pass = encoder.beginComputePass(timestampWrites ? { timestampWrites } : {});
    for (let i = 0; i < repeats; i++) dispatch(pass);
    pass.end();
    andThen?.(encoder);
    this.#gpu.device.queue.submit([encoder.finish()]);
  }

  /**
   * Run a kernel some times in one pass and take the time of all together, by the GPU's clock where it has one.
   * @param {(pass: GPUComputePassEncoder) => void} dispatch
   * @param {number} repeats
   * @returns {Promise<{ms: number, wallMs: number, clock: "gpu" | "wall"}>}
   */
  async #batch(dispatch, repeats) {
    const { device, hasClock } = this.#gpu;
    if (!hasClock) {
      const start = performance.now();
      this.#submit(dispatch, repeats);
      await device.queue.onSubmittedWorkDone();
      const wallMs = performance.now() - start;
      return { ms: wallMs, wallMs, clock: "wall" };
    }
    const querySet = device.createQuerySet({ type: "timestamp", count: 2 });
    const stamps = device.createBuffer({
      label: "stamps",
      size: 16,
      usage: GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC,
    });
    try {
      const start = performance.now();
      const writes = { querySet, beginningOfPassWriteIndex: 0, endOfPassWriteIndex: 1 };
      this.#submit(dispatch, repeats, writes, (encoder) => encoder.resolveQuerySet(querySet, 0, 2, stamps, 0));
      await device.queue.onSubmittedWorkDone();
      const wallMs = performance.now() - start;
      const [begin, end] = new BigUint64Array((await this.#gpu.read(stamps)).buffer);
      const ms = Number(end - begin) / 1e6;
      // Some drivers leave stamps at zero.
      return ms > 0 ? { ms, wallMs, clock: "gpu" } : { ms: wallMs, wallMs, clock: "wall" };
    } finally {
      querySet.destroy();
      stamps.destroy();
    }
  }
}
