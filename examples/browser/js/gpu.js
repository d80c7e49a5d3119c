/** One WebGPU device: its adapter, buffers and pipelines. Every fault of the driver becomes one explained error. */

import { PageError } from "./errors.js";
import { shown } from "./text.js";

/** @type {GPUErrorFilter[]} */
const SCOPES = ["validation", "out-of-memory", "internal"];
const UPLOAD_BYTES = 32 * 2 ** 20;
const PARAMS_BINDING = 4;

/** There is no WebGPU, or no adapter for it. */
export class NoGpuError extends PageError {}

export class Gpu {
  /** @type {Map<string, {pipeline: GPUComputePipeline, layout: GPUBindGroupLayout}>} */
  #pipelines = new Map();
  #lost = "";

  /** @param {GPUAdapter} adapter @param {GPUDevice} device */
  constructor(adapter, device) {
    this.name = adapterName(adapter);
    this.isSoftware = isSoftware(adapter);
    this.device = device;
    this.limits = device.limits;
    this.hasClock = device.features.has("timestamp-query");
    device.lost.then(({ reason, message }) => {
      this.#lost = message || reason;
    });
  }

  /**
   * Open a device on the adapter that the browser prefers, with all the room that it has for buffers.
   * @throws {PageError} there is no WebGPU, no adapter, or no device
   */
  static async open() {
    const adapter = await findAdapter();
    try {
      const device = await adapter.requestDevice({
        requiredFeatures: adapter.features.has("timestamp-query") ? ["timestamp-query"] : [],
        requiredLimits: {
          maxBufferSize: adapter.limits.maxBufferSize,
          maxStorageBufferBindingSize: adapter.limits.maxStorageBufferBindingSize,
        },
      });
      return new Gpu(adapter, device);
    } catch (error) {
      throw new PageError(
        `the browser refuses a device on ${adapterName(adapter)}: ${words(error)}`,
        "Reload the page, or restart the browser.",
      );
    }
  }

  get isLost() {
    return this.#lost !== "";
  }

  /** @param {number} nbytes @param {GPUBufferUsageFlags} usage @param {string} label */
  buffer(nbytes, usage, label) {
    return this.device.createBuffer({ label, size: Math.max(4, Math.ceil(nbytes / 4) * 4), usage });
  }

  /**
   * Make a storage buffer that holds an array.
   * @param {Float32Array | Uint32Array} array
   * @param {string} label
   */
  upload(array, label) {
    const buffer = this.buffer(
      array.byteLength,
      GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST,
      label,
    );
    const pieces = Math.ceil(array.byteLength / UPLOAD_BYTES);
    for (let i = 0; i < pieces; i++) {
      const start = i * UPLOAD_BYTES;
      const nbytes = Math.min(UPLOAD_BYTES, array.byteLength - start);
      this.device.queue.writeBuffer(buffer, start, array.buffer, array.byteOffset + start, nbytes);
    }
    return buffer;
  }

  /** Read a buffer back as 32-bit words. @param {GPUBuffer} buffer @returns {Promise<Uint32Array>} */
  async read(buffer) {
    const copy = this.buffer(buffer.size, GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST, "copy");
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, copy, 0, buffer.size);
    this.device.queue.submit([encoder.finish()]);
    try {
      await copy.mapAsync(GPUMapMode.READ);
      return new Uint32Array(copy.getMappedRange().slice(0));
    } finally {
      copy.destroy();
    }
  }

  /**
   * Make what one dispatch of a kernel needs.
   * @param {import("./kernel.js").Kernel} kernel
   * @param {ReadonlyMap<number, GPUBuffer>} buffers by binding, all but the Params
   * @param {import("./plan.js").Plan} plan
   * @returns {Promise<(pass: GPUComputePassEncoder) => void>} puts the dispatch into a pass
   */
  async prepare(kernel, buffers, { sizes, grid }) {
    const { pipeline, layout } = await this.#pipeline(kernel);
    const { M, N, K, K_packed } = sizes;
    const params = this.buffer(16, GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST, "params");
    this.device.queue.writeBuffer(params, 0, new Uint32Array([M, N, K, K_packed]));
    const group = this.device.createBindGroup({
      layout,
      entries: [...kernel.bindings.keys()].map((binding) => ({
        binding,
        resource: { buffer: binding === PARAMS_BINDING ? params : /** @type {GPUBuffer} */ (buffers.get(binding)) },
      })),
    });
    return (pass) => {
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...grid);
    };
  }

  /**
   * Run some work on the device; whatever the browser reports of it is an error that says what was being done.
   * @template T
   * @param {string} doing
   * @param {() => Promise<T>} work
   * @returns {Promise<T>}
   * @throws {PageError}
   */
  async checked(doing, work) {
    if (this.isLost) throw this.#fault(doing, "");
    for (const scope of SCOPES) this.device.pushErrorScope(scope);
    let result;
    let thrown;
    try {
      result = await work();
    } catch (error) {
      thrown = error;
    }
    const reported = (await Promise.all(SCOPES.map(() => this.device.popErrorScope().catch(() => null)))).find(Boolean);
    if (thrown instanceof PageError) throw thrown;
    if (thrown !== undefined || reported) {
      // The news that the device is lost may come a little after what it broke.
      await Promise.race([this.device.lost, new Promise((resolve) => setTimeout(resolve, 100))]);
      throw this.#fault(doing, reported?.message ?? words(thrown));
    }
    if (this.isLost) throw this.#fault(doing, "");
    return /** @type {T} */ (result);
  }

  /** @param {string} doing @param {string} message */
  #fault(doing, message) {
    if (!this.isLost) return new PageError(`${doing} on ${this.name}: ${message.trim().slice(0, 2000)}`);
    return new PageError(
      `${doing} on ${this.name}: the device was lost (${shown(this.#lost)})`,
      "The driver was reset, or a watchdog ended a long kernel. Try again, with fewer rows; the page opens a new device.",
    );
  }

  /** @param {import("./kernel.js").Kernel} kernel */
  async #pipeline(kernel) {
    const known = this.#pipelines.get(kernel.source);
    if (known) return known;
    const module = this.device.createShaderModule({ label: kernel.name, code: kernel.source });
    const faults = (await module.getCompilationInfo()).messages.filter(({ type }) => type === "error");
    if (faults.length) {
      const [{ lineNum, message }] = faults;
      throw new PageError(
        `kernel '${shown(kernel.name)}' does not compile: line ${lineNum}: ${message.slice(0, 1000)}`,
      );
    }
    const layout = this.device.createBindGroupLayout({
      entries: [...kernel.bindings].map(([binding, type]) => ({
        binding,
        visibility: GPUShaderStage.COMPUTE,
        buffer: { type },
      })),
    });
    const pipeline = await this.device.createComputePipelineAsync({
      label: kernel.name,
      layout: this.device.createPipelineLayout({ bindGroupLayouts: [layout] }),
      compute: { module, entryPoint: kernel.entryPoint },
    });
    const made = { pipeline, layout };
    this.#pipelines.set(kernel.source, made);
    return made;
  }
}

/**
 * Return the browser's adapter.
 * @returns {Promise<GPUAdapter>}
 * @throws {PageError} with the reason why there is none
 */
export async function findAdapter() {
  if (!globalThis.isSecureContext) {
    throw new NoGpuError(
      `${location.origin} is not a secure address, and browsers offer WebGPU on secure ones only`,
      "Open the page as http://localhost:PORT/… on the machine that serves it, or serve it by https.",
    );
  }
  if (!navigator.gpu) throw new NoGpuError("this browser has no WebGPU");
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" }).catch(() => null);
  if (!adapter) throw new NoGpuError("this browser has WebGPU, but no adapter for it: no GPU that it trusts");
  return adapter;
}

/** Return an adapter's name for people; browsers say little of it on purpose. @param {GPUAdapter} adapter */
export function adapterName({ info }) {
  const { vendor, architecture, device, description } = info ?? {}; // Chrome has it since 127
  const parts = description ? [description] : [vendor, architecture, device];
  return shown(parts.filter(Boolean).join(" ") || "an adapter without a name");
}

/** Tell whether an adapter computes on the CPU. @param {GPUAdapter} adapter */
export function isSoftware({ info }) {
  if (!info) return false;
  return (
    info.isFallbackAdapter === true ||
    /swiftshader|llvmpipe|lavapipe|basic render/i.test(`${info.architecture} ${info.description}`)
  );
}

/** @param {unknown} error */
function words(error) {
  return error instanceof Error ? error.message || error.name : String(error);
}
