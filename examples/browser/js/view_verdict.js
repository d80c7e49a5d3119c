/** Draws a verdict: the badge, a line for each kernel, what is wrong, the first numbers, and what can be taken along. */

import { descriptions, downloadButton, element, notice } from "./dom.js";
import { npyBlob } from "./npy.js";
import { count, general, plural, shellWord, shown } from "./text.js";

const FIRST = 4;

/**
 * What was run, for the report.
 * @typedef {object} Job
 * @property {import("./container.js").Container} container
 * @property {import("./container.js").PackedEntry} entry
 * @property {import("./input.js").Input} input
 * @property {string} inputSays how x came to be
 * @property {boolean} digestsChecked
 * @property {string} adapter
 */

/**
 * @param {Job} job
 * @param {import("./verify.js").Verdict} verdict
 * @returns {Node[]}
 */
export function verdictView(job, verdict) {
  const { entry, input } = job;
  const rows = input.values.length / entry.inFeatures;
  const failed = verdict.results.filter((result) => !isRight(result));
  const best =
    [...verdict.results].filter(isRight).sort((a, b) => (a.timing?.ms ?? 0) - (b.timing?.ms ?? 0))[0] ??
    verdict.results[0];
  const said = verdict.isMatch
    ? `y = x · Ŵᵀ of ${shown(entry.name)} is right: ${plural(rows, "row")} of x, ${plural(verdict.results.length, "kernel")}, on ${job.adapter}.`
    : `y = x · Ŵᵀ of ${shown(entry.name)} is wrong from ${failed.map(({ kernel }) => shown(kernel)).join(", ")}, on ${job.adapter}.`;
  return [
    element(
      "p",
      { className: "verdict", "data-verdict": verdict.isMatch ? "pass" : "fail" },
      element("strong", { className: "badge" }, verdict.isMatch ? "✓ Verified" : "✗ Failed"),
      element("span", {}, said),
    ),
    element("div", { className: "scroll" }, kernelTable(verdict)),
    ...failed.map(faults),
    firstNumbers(best, verdict, entry, rows),
    element(
      "div",
      { className: "downloads" },
      downloadButton("y.npy", () => npyBlob(best.y, [...input.shape.slice(0, -1), entry.outFeatures])),
      downloadButton("x.npy", () => npyBlob(input.values, input.shape)),
      element("span", { className: "note" }, `y as ${shown(best.kernel)} gave it`),
    ),
    details(job, verdict, rows),
  ];
}

/** @param {import("./verify.js").KernelResult} result */
function isRight({ exact, bounded }) {
  return exact.isMatch && bounded.isMatch;
}

/** @param {import("./verify.js").Verdict} verdict */
function kernelTable({ results }) {
  const clock = results.every(({ timing }) => !timing || timing.clock === "gpu") ? "GPU clock" : "wall clock";
  const titles = ["kernel", "integers", "real numbers", clock];
  const line = (/** @type {import("./verify.js").KernelResult} */ result) => {
    const { kernel, exact, bounded, timing } = result;
    const verdict = isRight(result) ? "pass" : "fail";
    const texts = [
      exact.isMatch ? `all ${count(exact.elements)} equal` : probeFault(exact),
      bounded.isMatch ? `worst is ${general(shareOf(bounded.worst), 2)} of the bound` : probeFault(bounded),
      timing ? `${general(timing.ms, 3)} ms` : "not timed",
    ];
    const title = element("th", { scope: "row" }, `${verdict === "pass" ? "✓" : "✗"} ${shown(kernel)}`);
    const cells = texts.map((text, i) => element("td", { "data-title": titles[i + 1] }, text)); // for narrow pages
    return element("tr", { "data-kernel": kernel, "data-verdict": verdict }, title, ...cells);
  };
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  return element(
    "table",
    { className: "kernels" },
    element("thead", {}, head),
    element("tbody", {}, ...results.map(line)),
  );
}

/** @param {import("./judge.js").Comparison} probe */
function probeFault({ failures, elements, unwritten }) {
  if (failures) return `${count(failures)} of ${count(elements)} wrong`;
  return unwritten ? `${count(unwritten)} never written` : "written behind y";
}

/** @param {import("./judge.js").Element} worst */
function shareOf({ error, bound }) {
  return error === 0 ? 0 : error / bound;
}

/** @param {import("./verify.js").KernelResult} result */
function faults({ kernel, exact, bounded }) {
  const texts = [];
  for (const [name, probe] of /** @type {const} */ ([
    ["integers", exact],
    ["real numbers", bounded],
  ])) {
    const { worst, failures, elements } = probe;
    if (failures) {
      texts.push(
        `${name}: ${count(failures)} of ${count(elements)} elements wrong; worst y[${worst.row}, ${worst.column}] = ` +
          `${general(worst.value, 9)}, expected ${general(worst.expected, 9)}, error ${general(worst.error, 3)}, bound ${general(worst.bound, 3)}`,
      );
    }
    if (probe.unwritten)
      texts.push(
        `${name}: ${plural(probe.unwritten, "element")} never written: too few workgroups, or a store left out`,
      );
    if (!probe.guardsIntact) texts.push(`${name}: something was written behind y: a store without a bounds check`);
  }
  if (exact.isMatch && bounded.failures)
    texts.push("the codes are read right: look at the scales, or at inputs that are no small integers");
  const hint = "For likely causes: qcs4w verify FILE --kernel KERNEL";
  return notice("error", `${shown(kernel)} gives wrong numbers`, hint, texts);
}

/**
 * @param {import("./verify.js").KernelResult} result
 * @param {import("./verify.js").Verdict} verdict
 * @param {import("./container.js").PackedEntry} entry
 * @param {number} rows
 */
function firstNumbers({ kernel, y, bounded }, { wanted }, { outFeatures: N }, rows) {
  const place = (/** @type {number} */ i) => `y[${Math.floor(i / N)}, ${i % N}]`;
  const worst = bounded.worst.row * N + bounded.worst.column;
  const shownOnes = [...new Set([...Array(Math.min(FIRST, rows * N)).keys(), worst])];
  const line = (/** @type {number} */ i) => {
    const error = Math.abs(y[i] - wanted.y[i]);
    const cells = [general(y[i], 9), general(wanted.y[i], 17), general(error, 3), general(wanted.bound[i], 3)];
    const title = i === worst ? `${place(i)} worst` : place(i);
    return element("tr", {}, element("th", { scope: "row" }, title), ...cells.map((cell) => element("td", {}, cell)));
  };
  const head = ["", "GPU, float32", "JavaScript, float64", "error", "bound"].map((title) =>
    element("th", { scope: "col" }, title),
  );
  return element(
    "details",
    { open: true },
    element("summary", {}, `First numbers of ${shown(kernel)}`),
    element(
      "div",
      { className: "scroll" },
      element(
        "table",
        { className: "numbers" },
        element("thead", {}, element("tr", {}, ...head)),
        element("tbody", {}, ...shownOnes.map(line)),
      ),
    ),
  );
}

/** @param {Job} job @param {import("./verify.js").Verdict} verdict @param {number} rows */
function details({ container, entry, inputSays, digestsChecked, adapter }, { results, factor }, rows) {
  const file = shellWord(shown(container.file.name));
  const tensor = shellWord(shown(entry.name));
  const noBias = container.biasName(entry) ? " --no-bias" : "";
  const commands = `qcs4w verify ${file} --tensor ${tensor}\nqcs4w run ${file} --tensor ${tensor} -x x.npy -o y.npy${noBias}`;
  return element(
    "details",
    {},
    element("summary", {}, "How this was found"),
    descriptions([
      ["adapter", adapter],
      ["x", `${inputSays}; M ${rows}, K ${entry.inFeatures}`],
      [
        "bound",
        `c · (K + 2) · 2⁻²⁴ · Σ|x·ŵ| and a term for flushed subnormals; c = ${factor}: the adapter ${factor === 1 ? "rounds to nearest" : "does not round to nearest"}`,
      ],
      ["time", timeSays(results.flatMap(({ timing }) => timing ?? []))],
      [
        "digests",
        digestsChecked
          ? "sha256 of packed bytes and scales are those of the metadata"
          : "not checked: browsers offer sha256 on https and localhost only",
      ],
    ]),
    element("p", {}, "The same on the command line:"),
    element("pre", {}, element("code", {}, commands)),
  );
}

/** Say how the times were taken. @param {import("./linear.js").Timing[]} timings */
function timeSays(timings) {
  if (!timings.length) return "none: a kernel that is wrong is not timed";
  const clock = timings.every((timing) => timing.clock === "gpu")
    ? "the GPU's own clock (timestamp-query)"
    : "wall time, from submitting to done, as there is no timestamp-query that answers";
  return `${clock}; a dispatch's share of its batch, the median of batches (${timings.map(({ dispatches }) => count(dispatches)).join(", ")} dispatches)`;
}
