/** The form beside the verdict: which x, which kernel, and how far the work is. */

import { byId, element } from "./dom.js";
import { PageError } from "./errors.js";
import { randomInput, readInput } from "./input.js";
import { LINEAR_KERNELS, shippedKernel } from "./kernel.js";
import { shown } from "./text.js";

const EVERY_KERNEL = "each of qcs4w's kernels";

export class RunForm {
  #kernel = byId("kernel", HTMLSelectElement);
  #isFromFile = byId("x-from-file", HTMLInputElement);
  /** @type {File | null} */
  #xFile = null;
  /** @type {import("./kernel.js").Kernel | null} */
  #ownKernel = null;

  constructor() {
    this.#fillKernels();
    for (const radio of document.querySelectorAll("input[name=x]")) {
      radio.addEventListener("change", () => this.#showInput());
    }
  }

  /** Take a file for x. @param {File} file */
  takeInput(file) {
    this.#xFile = file;
    this.#isFromFile.checked = true;
    this.#showInput();
  }

  /** Forget the file for x: it was for another weight. */
  forgetInput() {
    this.#xFile = null;
    byId("x-random", HTMLInputElement).checked = true;
    this.#showInput();
  }

  /** Take a kernel of the person's own. @param {import("./kernel.js").Kernel} kernel */
  takeKernel(kernel) {
    this.#ownKernel = kernel;
    this.#fillKernels();
    this.#kernel.value = "own";
  }

  /** Return the kernels that are chosen. @returns {Promise<import("./kernel.js").Kernel[]>} */
  async kernels() {
    const { value } = this.#kernel;
    if (value === "own" && this.#ownKernel) return [this.#ownKernel];
    return Promise.all((value === "" ? LINEAR_KERNELS : [value]).map(shippedKernel));
  }

  /**
   * Return the x that is chosen.
   * @param {import("./container.js").PackedEntry} entry the weight that it is for
   * @returns {Promise<{input: import("./input.js").Input, inputSays: string, seed: number}>}
   */
  async input(entry) {
    const seed = Number(byId("seed", HTMLInputElement).value);
    if (!this.#isFromFile.checked) {
      const rows = Number(byId("rows", HTMLInputElement).value);
      return { input: randomInput(rows, entry.inFeatures, seed), inputSays: `random, seed ${seed}`, seed };
    }
    if (!this.#xFile) {
      throw new PageError("there is no file for x yet", "Choose one, drop it on the page, or take random rows.");
    }
    return { input: await readInput(this.#xFile, entry), inputSays: shown(this.#xFile.name), seed };
  }

  /** @param {boolean} isRunning */
  setRunning(isRunning) {
    byId("progress", HTMLElement).hidden = !isRunning;
    byId("run", HTMLButtonElement).disabled = isRunning;
    byId("stop", HTMLButtonElement).hidden = !isRunning;
    byId("run-card", HTMLElement).setAttribute("aria-busy", String(isRunning));
  }

  /** @param {string} title @param {number} done @param {number} total 0 where nobody knows */
  showProgress(title, done, total) {
    const bar = byId("progress-bar", HTMLProgressElement);
    const share = total ? `: ${Math.floor((100 * done) / total)} %` : " …";
    byId("progress-text", HTMLElement).textContent = title + share;
    if (total) bar.value = done / total;
    else bar.removeAttribute("value");
  }

  #showInput() {
    const isFromFile = this.#isFromFile.checked;
    byId("random-fields", HTMLElement).hidden = isFromFile;
    byId("x-fields", HTMLElement).hidden = !isFromFile;
    for (const id of ["rows", "seed"]) byId(id, HTMLInputElement).disabled = isFromFile;
    const none = "none yet; it can be dropped on the page, too";
    byId("x-name", HTMLElement).textContent = this.#xFile ? shown(this.#xFile.name) : none;
  }

  #fillKernels() {
    const choices = [["", EVERY_KERNEL], ...LINEAR_KERNELS.map((name) => [name, name])];
    if (this.#ownKernel) choices.push(["own", `${shown(this.#ownKernel.name)} (yours)`]);
    this.#kernel.replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
  }
}
