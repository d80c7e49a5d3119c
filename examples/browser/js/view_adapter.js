/** Says which adapter there is, and what to do where a browser has none. */

import { byId, element, notice } from "./dom.js";
import { NoGpuError, adapterName, findAdapter, isSoftware } from "./gpu.js";
import { count } from "./text.js";

/** What is to be typed stands between backticks. @type {[string, string][]} */
const BROWSERS = [
  [
    "Chrome, Edge",
    "113 and later on Windows, macOS and ChromeOS, 121 and later on Android. See `chrome://gpu`, and turn on “Use graphics acceleration when available”.",
  ],
  [
    "Chrome on Linux",
    "on for some GPUs from 144; else start it with `--enable-unsafe-webgpu` `--enable-features=Vulkan`, or set `chrome://flags/#enable-unsafe-webgpu` and `#enable-vulkan`.",
  ],
  [
    "Firefox",
    "141 and later on Windows, 145 and later on Macs with Apple silicon; elsewhere Nightly, or `dom.webgpu.enabled` in `about:config`.",
  ],
  ["Safari", "26 and later on macOS, iOS and visionOS."],
  [
    "No GPU",
    "Chromium computes on the CPU when started with `--enable-unsafe-webgpu` `--use-webgpu-adapter=swiftshader`.",
  ],
];

/** Return the list of what to do. */
export function browserHelp() {
  const parts = (/** @type {string} */ text) =>
    text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
  return element(
    "dl",
    { className: "browsers" },
    ...BROWSERS.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, ...parts(text))]),
  );
}

/**
 * Say which adapter there is, before anybody asks for it.
 * @returns {Promise<NoGpuError | null>} why there is none
 */
export async function showAdapter() {
  const chip = byId("adapter", HTMLElement);
  try {
    const adapter = await findAdapter();
    chip.dataset.state = isSoftware(adapter) ? "software" : "ready";
    chip.textContent = `${adapterName(adapter)}${isSoftware(adapter) ? ", on the CPU" : ""}`;
    chip.title = `The adapter that WebGPU offers here. Buffers up to ${count(adapter.limits.maxStorageBufferBindingSize)} bytes.`;
    return null;
  } catch (error) {
    if (!(error instanceof NoGpuError)) throw error;
    chip.dataset.state = "none";
    chip.textContent = "no WebGPU here";
    byId("help-title", HTMLElement).textContent = "No WebGPU here: what to do";
    byId("help", HTMLElement).prepend(
      notice("warning", error.message, error.hint || "Files can be looked at all the same, but not run."),
    );
    byId("empty", HTMLElement).prepend(byId("help-card", HTMLElement));
    return error;
  }
}
