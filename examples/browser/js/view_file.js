/** Draws what a container says: the file, its tensors to choose from, and the metadata of the chosen one. */

import { descriptions, element, notice } from "./dom.js";
import { count, plural, shown, size } from "./text.js";

// More than a person can look through; the filter finds the others.
const MOST_SHOWN = 200;
const MOST_PROBLEMS = 8;

/** Return one line about a file. @param {import("./container.js").Container} container */
export function fileFacts({ file, document: said, entries, carried }) {
  const text = (/** @type {unknown} */ value) => shown(String(value ?? "?"));
  return [
    size(file.size),
    `container version ${text(said.version)}`,
    `nibble order ${text(said.nibble_order)}, offset ${text(said.offset)}`,
    `made by ${text(said.tool)}`,
    `${plural(entries.size, "packed tensor")}${carried > 0 ? ` and ${count(carried)} as in the source` : ""}`,
  ].join(" · ");
}

/** Return what a reader refuses of a container, or nothing. @param {import("./container.js").Container} container */
export function fileProblems({ problems, file }) {
  if (!problems.length) return [];
  const [first] = problems;
  const items = problems.slice(0, MOST_PROBLEMS);
  if (problems.length > MOST_PROBLEMS) items.push(`and ${plural(problems.length - MOST_PROBLEMS, "more problem")}`);
  const hint = "A reader refuses this file, so nothing of it is run. What can be shown of it is shown.";
  return [
    notice(
      "error",
      `${shown(file.name)}: ${items.length === 1 ? first : "several things are wrong"}`,
      hint,
      items.length > 1 ? items : [],
    ),
  ];
}

/**
 * Fill the list of tensors to choose from.
 * @param {HTMLElement} list
 * @param {import("./container.js").Container} container
 * @param {string} filter
 * @param {string | null} chosen
 */
export function fillTensorList(list, { entries }, filter, chosen) {
  const wanted = filter.toLowerCase();
  const found = [...entries.values()].filter(({ name }) => name.toLowerCase().includes(wanted));
  list.replaceChildren(...found.slice(0, MOST_SHOWN).map((entry) => tensorChoice(entry, entry.name === chosen)));
  if (found.length > MOST_SHOWN)
    list.append(
      element("p", { className: "note" }, `${count(found.length - MOST_SHOWN)} more: narrow them down by name`),
    );
  if (!found.length) list.append(element("p", { className: "note" }, "no tensor has that in its name"));
}

/** @param {import("./container.js").PackedEntry} entry @param {boolean} isChosen */
function tensorChoice({ name, outFeatures, inFeatures, width }, isChosen) {
  return element(
    "label",
    { className: "tensor" },
    element("input", { type: "radio", name: "tensor", value: name, checked: isChosen }),
    element("bdi", { className: "name" }, shown(name)),
    element("span", { className: "shape" }, `${count(outFeatures)} × ${count(inFeatures)}`),
    element("span", { className: "size" }, size(outFeatures * (width + 4))),
  );
}

/**
 * Return the metadata of a tensor.
 * @param {import("./container.js").Container} container
 * @param {import("./container.js").PackedEntry} entry
 * @param {Node} digest says how the digests are
 */
export function entryFacts(container, entry, digest) {
  const { outFeatures: N, inFeatures: K, width, said } = entry;
  const bias = container.biasName(entry);
  /** @type {[string, string | Node][]} */
  const pairs = [
    ["N × K", `${count(N)} outputs × ${count(K)} inputs`],
    [
      "packed",
      `${count(N * width)} bytes, ${plural(width, "byte")} a row${K % 2 ? ", the last nibble is padding" : ""}`,
    ],
    ["at byte", `${count(container.rowOffset(entry, 0))} of the file`],
    [
      "source",
      said
        ? `${shown(said.source_dtype)}, scales by ${shown(said.method)}${said.transposed ? ", transposed" : ""}`
        : "not described",
    ],
    ["digests", digest],
  ];
  if (said?.aliases.length) pairs.push(["also", said.aliases.map(shown).join(", ")]);
  if (bias) pairs.push(["bias", `${shown(bias)} is in the file; it is not part of what is verified`]);
  if ((N * width) % 4) pairs.push(["note", "ExecuTorch's WebGPU runtime refuses it: its bytes are no multiple of 4"]);
  return descriptions(pairs);
}
