/** Draws the nibbles of a tensor, and walks through them. */

import { byId, element, notice } from "./dom.js";
import { dumpOf } from "./dump.js";
import { PageError } from "./errors.js";
import { LAYOUTS } from "./nibbles.js";
import { count, general, shown } from "./text.js";

const [ROWS, COLUMNS] = [4, 16];

export class DumpView {
  #row = byId("dump-row", HTMLInputElement);
  #column = byId("dump-column", HTMLInputElement);
  #layout = byId("layout", HTMLSelectElement);
  #facts = byId("dump-facts", HTMLElement);
  #place = byId("dump", HTMLElement);
  /** @type {{container: import("./container.js").Container, entry: import("./container.js").PackedEntry} | null} */
  #shown = null;
  #turn = 0;
  #width = 0;

  constructor() {
    this.#layout.replaceChildren(...LAYOUTS.map(({ name }) => element("option", { value: name }, name)));
    byId("dump-form", HTMLFormElement).addEventListener("submit", (event) => event.preventDefault());
    for (const input of [this.#row, this.#column, this.#layout]) input.addEventListener("change", () => this.#draw());
    for (const [id, input, step] of /** @type {[string, HTMLInputElement, number][]} */ ([
      ["rows-back", this.#row, -ROWS],
      ["rows-on", this.#row, ROWS],
      ["columns-back", this.#column, -COLUMNS],
      ["columns-on", this.#column, COLUMNS],
    ])) {
      byId(id, HTMLButtonElement).addEventListener("click", () => {
        input.value = String(Number(input.value) + step);
        this.#draw();
      });
    }
    new ResizeObserver(() => this.#panelColumns() !== this.#width && this.#draw()).observe(this.#place);
  }

  /**
   * Show a tensor from its first row and column on.
   * @param {import("./container.js").Container} container
   * @param {import("./container.js").PackedEntry} entry
   */
  async show(container, entry) {
    this.#shown = { container, entry };
    this.#row.value = "0";
    this.#column.value = "0";
    await this.#draw();
  }

  async #draw() {
    if (!this.#shown) return;
    const turn = ++this.#turn;
    const { container, entry } = this.#shown;
    const rows = within(this.#row, ROWS, entry.outFeatures);
    const columns = within(this.#column, COLUMNS, entry.inFeatures);
    for (const [id, isOff] of /** @type {[string, boolean][]} */ ([
      ["rows-back", rows.start === 0],
      ["rows-on", rows.stop === entry.outFeatures],
      ["columns-back", columns.start === 0],
      ["columns-on", columns.stop === entry.inFeatures],
    ])) {
      byId(id, HTMLButtonElement).disabled = isOff;
    }
    const layout = LAYOUTS.find(({ name }) => name === this.#layout.value) ?? LAYOUTS[0];
    const order = `even column in the ${layout.evenHigh ? "high" : "low"} nibble, ${layout.twosComplement ? "two's complement" : "code + 8"}`;
    const place = `rows ${rows.start}–${rows.stop - 1} of ${count(entry.outFeatures)}, columns ${columns.start}–${columns.stop - 1} of ${count(entry.inFeatures)}`;
    try {
      const dump = await dumpOf(container, entry, rows, columns, layout);
      if (turn !== this.#turn) return; // a newer one is on its way
      this.#facts.textContent = `${shown(entry.name)}: ${place}, read as ${layout.name}: ${order}`;
      this.#width = this.#panelColumns();
      this.#place.replaceChildren(...dump.map((row) => this.#rowOf(row)));
    } catch (error) {
      if (!(error instanceof PageError)) throw error;
      this.#place.replaceChildren(notice("error", error.message, error.hint));
    }
  }

  /** How many columns stand beside each other: whole bytes, as many as the page is wide. */
  #panelColumns() {
    const style = getComputedStyle(this.#place);
    const rem = Number.parseFloat(getComputedStyle(document.documentElement).fontSize);
    const [title, cell] = ["--title", "--cell"].map((name) => Number.parseFloat(style.getPropertyValue(name)) * rem);
    const room = Math.floor((this.#place.clientWidth - title) / cell);
    return [16, 8, 4, 2].find((columns) => columns <= room) ?? 2;
  }

  /** @param {import("./dump.js").DumpRow} row its cells are at least one */
  #rowOf({ row, scale, fileOffset, cells }) {
    const panels = [];
    // Whole bytes in each panel: it starts at an even column.
    for (let at = -(cells[0].k % 2); at < cells.length; at += this.#width) {
      const part = cells.slice(Math.max(at, 0), at + this.#width);
      if (part.length === 1 && part[0].isPad) panels[panels.length - 1].push(...part);
      else panels.push(part);
    }
    return element(
      "section",
      { className: "dump-row" },
      element(
        "h3",
        {},
        `row ${row}`,
        element("span", {}, `scale ${general(scale, 9)} · file offset ${fileOffset} (0x${fileOffset.toString(16)})`),
      ),
      ...panels.map((part) => element("div", { className: "scroll" }, panelOf(row, part))),
    );
  }
}

/** @param {number} row @param {import("./dump.js").Cell[]} cells */
function panelOf(row, cells) {
  const half = (/** @type {import("./dump.js").Cell} */ { high, isPad }) => (isPad ? "pad" : high ? "high" : "low");
  const bytes = [];
  for (let i = 0; i < cells.length; i++) {
    const isWhole = cells[i].k % 2 === 0 && i + 1 < cells.length;
    bytes.push(element("td", { colSpan: isWhole ? 2 : 1 }, hex(cells[i].byte, 2)));
    if (isWhole) i++;
  }
  /** @type {[string, (cell: import("./dump.js").Cell) => string, boolean][]} */
  const lines = [
    ["half", ({ high }) => (high ? "high" : "low"), true],
    ["nibble", ({ nibble }) => hex(nibble, 1), true],
    ["code", ({ code, isPad }) => (isPad ? "" : String(code)), false],
    ["value", ({ value, isPad }) => (isPad ? "" : general(value)), false],
  ];
  return element(
    "table",
    { className: "nibbles" },
    element("caption", { className: "visually-hidden" }, `row ${row}, columns from ${cells[0].k}`),
    line(
      "k",
      cells.map(({ k, isPad }) => element("th", { scope: "col" }, isPad ? "pad" : String(k))),
    ),
    line("byte", bytes, "bytes"),
    ...lines.map(([title, text, isColoured]) =>
      line(
        title,
        cells.map((cell) => element("td", { className: isColoured ? half(cell) : "" }, text(cell))),
        title,
      ),
    ),
  );
}

/** @param {string} title @param {Node[]} cells @param {string} [className] */
function line(title, cells, className = "") {
  return element("tr", { className }, element("th", { scope: "row" }, title), ...cells);
}

/** @param {number} value @param {number} digits */
function hex(value, digits) {
  return value.toString(16).toUpperCase().padStart(digits, "0");
}

/** Return a range from an input's value on, moved into 0..limit. @param {HTMLInputElement} input @param {number} length @param {number} limit */
function within(input, length, limit) {
  const asked = Math.floor(Number(input.value)) || 0;
  const start = Math.min(Math.max(asked, 0), limit - 1);
  input.value = String(start);
  input.max = String(limit - 1);
  return { start, stop: Math.min(start + length, limit) };
}
