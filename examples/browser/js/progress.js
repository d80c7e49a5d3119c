/** Long work in slices, so that the page stays alive, shows how far it is, and can be stopped. */

import { Stopped } from "./errors.js";

// What a person does not notice: the work hands over to the browser whenever so much time has gone.
const SLICE_MS = 16;

export class Progress {
  #show;
  #signal;
  #last = performance.now();
  #title = "";

  /**
   * @param {(title: string, done: number, total: number) => void} show draws how far it is
   * @param {AbortSignal} signal stops the work
   */
  constructor(show, signal) {
    this.#show = show;
    this.#signal = signal;
  }

  /** Begin another part of the work. @param {string} title */
  async part(title) {
    this.#title = title;
    this.#show(title, 0, 0);
    await this.#handOver();
  }

  /** Whether the browser has waited long enough; asking costs less than awaiting a step that has nothing to do. */
  get isDue() {
    return performance.now() - this.#last >= SLICE_MS;
  }

  /**
   * Say how far this part is; hand over to the browser when it is time.
   * @param {number} done
   * @param {number} total
   * @throws {Stopped}
   */
  async step(done, total) {
    if (!this.isDue) return;
    this.#show(this.#title, done, total);
    await this.#handOver();
  }

  async #handOver() {
    await new Promise((resolve) => setTimeout(resolve));
    this.check();
    this.#last = performance.now();
  }

  /** @throws {Stopped} the work is to stop */
  check() {
    if (this.#signal.aborted) throw new Stopped();
  }
}
