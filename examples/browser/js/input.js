/** The x of a run: seeded random rows, or a person's own file. */

import { PageError } from "./errors.js";
import { FLOAT_DTYPES, floatsFrom } from "./floats.js";
import { readNpy } from "./npy.js";
import { generator, nearlyNormal } from "./random.js";
import { openSafetensors, readBytes } from "./safetensors.js";
import { quoted, shown } from "./text.js";

// x is read whole; more than this is a matter for the command line.
const MOST_BYTES = 2 ** 30;

/** An input: its shape is [..., K], its values are rows of K. @typedef {import("./npy.js").FloatArray} Input */

/**
 * @param {number} rows M
 * @param {number} inFeatures K
 * @param {number} seed
 * @returns {Input}
 */
export function randomInput(rows, inFeatures, seed) {
  return { shape: [rows, inFeatures], values: nearlyNormal(rows * inFeatures, generator(seed)) };
}

/**
 * Read x from a .npy or .safetensors file.
 * @param {File} file
 * @param {import("./container.js").PackedEntry} entry the weight that it is for
 * @returns {Promise<Input>}
 * @throws {PageError} the file is not sound, or x does not fit the weight
 */
export async function readInput(file, entry) {
  if (file.size > MOST_BYTES)
    throw new PageError(`${shown(file.name)}: has more than 1 GiB`, "Use the command line: qcs4w run.");
  const input = isNpy(file) ? await readNpy(file) : await readFromSafetensors(file, entry);
  const { shape, values } = input;
  const label = `${shown(file.name)}: x of '${shown(entry.name)}'`;
  if (shape.length < 1 || shape[shape.length - 1] !== entry.inFeatures) {
    throw new PageError(`${label} has shape [${shape}], expected [..., ${entry.inFeatures}]`);
  }
  if (!values.length) throw new PageError(`${label} has shape [${shape}], which has no rows`);
  const wrong = values.findIndex((value) => !Number.isFinite(value));
  if (wrong >= 0) {
    const [row, column] = [Math.floor(wrong / entry.inFeatures), wrong % entry.inFeatures];
    throw new PageError(
      `${label} holds ${values[wrong]} at row ${row}, column ${column}; it must be finite in float32`,
    );
  }
  return input;
}

/** @param {File} file */
export function isNpy(file) {
  return file.name.toLowerCase().endsWith(".npy");
}

/** Tell whether a sound safetensors file has an x for a weight. @param {File} file @param {import("./container.js").PackedEntry} entry */
export async function holdsInput(file, entry) {
  return inputName(await openSafetensors(file), entry) !== undefined;
}

/**
 * Return the name of x in a file: the weight's, its module's, or that of the only tensor.
 * @param {import("./safetensors.js").SafetensorsFile} opened
 * @param {import("./container.js").PackedEntry} entry
 */
function inputName({ slots }, { name }) {
  const names = [name, name.replace(/\.weight$/, ""), ...(slots.size === 1 ? slots.keys() : [])];
  return names.find((candidate) => slots.has(candidate));
}

/** @param {File} file @param {import("./container.js").PackedEntry} entry @returns {Promise<Input>} */
async function readFromSafetensors(file, entry) {
  const opened = await openSafetensors(file);
  const name = inputName(opened, entry);
  const slot = name === undefined ? undefined : opened.slots.get(name);
  if (!slot) {
    throw new PageError(
      `${shown(file.name)}: holds ${opened.slots.size} tensors, none of them named ${quoted(entry.name)}`,
      "Name x as the weight or its module, or drop a .npy file.",
    );
  }
  if (!FLOAT_DTYPES.includes(slot.dtype))
    throw new PageError(`${shown(file.name)}: ${quoted(name)} is ${slot.dtype}, expected floats`);
  const bytes = await readBytes(file, slot.start, slot.nbytes);
  return { shape: slot.shape, values: floatsFrom(slot.dtype, bytes.buffer) };
}
