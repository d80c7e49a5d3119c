/** What to do where a browser has no WebGPU. */

import { element } from "./dom.js";

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
