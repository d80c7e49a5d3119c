/**
 * Safetensors by slices of a File: the header, then only what is asked for. Files of many GB are never read whole.
 *
 * The format: 8 bytes, little-endian, the header's length; a JSON header {name: {dtype, shape, data_offsets}}; then
 * the tensors' bytes, little-endian, C order, without holes. Source: huggingface/safetensors, README.
 */

import { PageError, Stopped } from "./errors.js";
import { isObject, isUnicode, parseJson } from "./json.js";
import { count, quoted, shown } from "./text.js";

// The format allows 100 MB. A page must not stand still for so long, and the largest headers in use have a few MB.
const MAX_HEADER = 32_000_000;
const MAX_RANK = 64;
const CHUNK = 32 * 2 ** 20;

/** Bits of one element, for every dtype the format knows. @type {Record<string, number>} */
const DTYPE_BITS = {
  BOOL: 8,
  U8: 8,
  I8: 8,
  F8_E5M2: 8,
  F8_E4M3: 8,
  F8_E8M0: 8,
  F8_E4M3FNUZ: 8,
  F8_E5M2FNUZ: 8,
  F4: 4,
  F6_E2M3: 6,
  F6_E3M2: 6,
  I16: 16,
  U16: 16,
  F16: 16,
  BF16: 16,
  I32: 32,
  U32: 32,
  F32: 32,
  I64: 64,
  U64: 64,
  F64: 64,
  C64: 64,
};

/**
 * One tensor's place in a file.
 * @typedef {object} Slot
 * @property {string} dtype
 * @property {number[]} shape
 * @property {number} start the first byte's offset in the file
 * @property {number} nbytes
 */

/**
 * @typedef {object} SafetensorsFile
 * @property {File} file
 * @property {Map<string, string>} metadata
 * @property {Map<string, Slot>} slots by name, in the header's order
 */

/**
 * Read a file's header.
 * @param {File} file
 * @returns {Promise<SafetensorsFile>}
 * @throws {PageError} it cannot be read, or is not a sound safetensors file
 */
export async function openSafetensors(file) {
  const fault = (/** @type {string} */ message) =>
    new PageError(
      `${shown(file.name)}: not a sound safetensors file: ${message}`,
      "Download or export the file again; it may be truncated, or of another format.",
    );
  if (file.size < 8) throw fault(`it has ${file.size} bytes, a header needs at least 8`);
  const length = new DataView((await readBytes(file, 0, 8)).buffer).getBigUint64(0, true);
  if (length > BigInt(file.size - 8)) {
    throw fault(
      `the header claims ${length.toLocaleString("en-US")} bytes, the file has ${count(file.size - 8)} after the length`,
    );
  }
  if (length > BigInt(MAX_HEADER)) {
    throw new PageError(
      `${shown(file.name)}: its header has ${length.toLocaleString("en-US")} bytes, this page reads up to ${count(MAX_HEADER)}`,
      "Real headers have a few MB at most. The command line reads larger ones: qcs4w inspect FILE.",
    );
  }
  const headerSize = Number(length);
  let header;
  try {
    const bytes = await readBytes(file, 8, headerSize);
    header = parseJson(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch (error) {
    if (error instanceof PageError) throw error;
    const why = error instanceof SyntaxError ? error.message : "it is not UTF-8";
    throw fault(`the header is not JSON (${shown(why)})`);
  }
  if (!isObject(header)) throw fault("the header is not a JSON object");
  const said = header.__metadata__ ?? {};
  if (!isObject(said) || !Object.values(said).every((value) => typeof value === "string")) {
    throw fault("__metadata__ is not an object of strings");
  }
  const metadata = new Map(/** @type {[string, string][]} */ (Object.entries(said)));
  for (const pair of metadata) if (!pair.every(isUnicode)) throw fault("__metadata__ is not valid Unicode");
  /** @type {Map<string, Slot>} */
  const slots = new Map();
  for (const [name, entry] of Object.entries(header)) {
    if (name !== "__metadata__") slots.set(name, slotOf(name, entry, 8 + headerSize, file.size, fault));
  }
  checkCover(slots, 8 + headerSize, file.size, fault);
  return { file, metadata, slots };
}

/**
 * Read exactly some bytes of a file, in pieces, so that a person can see it go on and stop it.
 * @param {File} file
 * @param {number} start
 * @param {number} nbytes
 * @param {import("./progress.js").Progress} [progress]
 * @returns {Promise<Uint8Array<ArrayBuffer>>}
 */
export async function readBytes(file, start, nbytes, progress) {
  try {
    if (nbytes <= CHUNK) return exactly(await file.slice(start, start + nbytes).arrayBuffer(), nbytes);
    const whole = new Uint8Array(nbytes);
    for (let at = 0; at < nbytes; at += CHUNK) {
      await progress?.step(at, nbytes);
      const size = Math.min(CHUNK, nbytes - at);
      whole.set(exactly(await file.slice(start + at, start + at + size).arrayBuffer(), size), at);
    }
    return whole;
  } catch (error) {
    if (error instanceof Stopped) throw error;
    const memory = error instanceof RangeError;
    throw new PageError(
      `${shown(file.name)}: ${count(nbytes)} bytes at offset ${count(start)} cannot be read: ` +
        (error instanceof Error ? error.message : String(error)),
      memory
        ? "The browser has no memory for it: close other tabs, or use the command line: qcs4w verify FILE."
        : "Is it a folder, or was it changed, moved or removed since it was chosen? Choose it again.",
    );
  }
}

/** @param {ArrayBuffer} buffer @param {number} nbytes */
function exactly(buffer, nbytes) {
  if (buffer.byteLength !== nbytes) throw new Error(`${count(buffer.byteLength)} came`);
  return new Uint8Array(buffer);
}

/**
 * @param {string} name
 * @param {unknown} entry
 * @param {number} dataStart
 * @param {number} fileSize
 * @param {(message: string) => PageError} fault
 * @returns {Slot}
 */
function slotOf(name, entry, dataStart, fileSize, fault) {
  const label = quoted(name);
  if (!isUnicode(name)) throw fault(`tensor name ${label} is not valid Unicode`);
  if (!isObject(entry)) throw fault(`the entry of tensor ${label} is not an object`);
  const { dtype, shape, data_offsets: offsets } = entry;
  if (typeof dtype !== "string" || !Object.hasOwn(DTYPE_BITS, dtype)) {
    throw fault(`tensor ${label} has dtype ${quoted(dtype)}, which the format does not know`);
  }
  if (!areSizes(shape)) throw fault(`tensor ${label} has shape ${quoted(shape)}, expected a list of sizes`);
  if (!areSizes(offsets) || offsets.length !== 2 || offsets[0] > offsets[1]) {
    throw fault(`tensor ${label} has data_offsets ${quoted(offsets)}, expected [begin, end]`);
  }
  const [begin, end] = offsets;
  // Sizes are below 2^53 each, their product need not be.
  const bits = shape.reduce((product, size) => product * BigInt(size), BigInt(DTYPE_BITS[dtype]));
  if (bits !== BigInt(end - begin) * 8n) {
    throw fault(
      `tensor ${label} is ${dtype} ${quoted(shape)}, that is ${bits.toLocaleString("en-US").slice(0, 60)} bits, ` +
        `but its offsets hold ${count(end - begin)} bytes`,
    );
  }
  if (dataStart + end > fileSize) {
    throw fault(
      `tensor ${label} ends at byte ${count(dataStart + end)}, the file has ${count(fileSize)}: it is truncated`,
    );
  }
  return { dtype, shape, start: dataStart + begin, nbytes: end - begin };
}

/**
 * Refuse overlaps, holes and bytes that belong to no tensor.
 * @param {Map<string, Slot>} slots
 * @param {number} dataStart
 * @param {number} fileSize
 * @param {(message: string) => PageError} fault
 */
function checkCover(slots, dataStart, fileSize, fault) {
  let end = dataStart;
  for (const [name, slot] of [...slots].sort(([, a], [, b]) => a.start - b.start || a.nbytes - b.nbytes)) {
    if (slot.start !== end) {
      throw fault(
        `tensor ${quoted(name)} starts at byte ${count(slot.start)}, expected ${count(end)}: overlap or hole`,
      );
    }
    end += slot.nbytes;
  }
  if (end !== fileSize) throw fault(`${count(fileSize - end)} bytes after the last tensor belong to none`);
}

/** @param {unknown} value @returns {value is number[]} */
function areSizes(value) {
  return Array.isArray(value) && value.length <= MAX_RANK && value.every((v) => Number.isSafeInteger(v) && v >= 0);
}
