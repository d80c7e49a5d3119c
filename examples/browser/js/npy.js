/** NumPy's .npy: plain float arrays in, float32 out. */

import { PageError } from "./errors.js";
import { floatsFrom } from "./floats.js";
import { count, shown } from "./text.js";

const MAGIC = "\x93NUMPY";
const MAX_HEADER = 100_000;
/** @type {Record<string, string>} */
const DTYPES = { "<f2": "F16", "<f4": "F32", "<f8": "F64" };

/**
 * An array out of a file.
 * @typedef {object} FloatArray
 * @property {number[]} shape
 * @property {Float32Array} values
 */

/**
 * @param {File} file
 * @returns {Promise<FloatArray>}
 * @throws {PageError} not a sound .npy file of floats
 */
export async function readNpy(file) {
  const fault = (/** @type {string} */ message) =>
    new PageError(`${shown(file.name)}: ${message}`, "Save it again: numpy.save('x.npy', x.astype('float32')).");
  const head = new DataView(await file.slice(0, 12).arrayBuffer());
  const magic = Array.from({ length: Math.min(6, head.byteLength) }, (_, i) =>
    String.fromCharCode(head.getUint8(i)),
  ).join("");
  if (head.byteLength < 12 || magic !== MAGIC) throw fault("is not a .npy file");
  const version = head.getUint8(6);
  if (version < 1 || version > 3) throw fault(`is of .npy version ${version}, which is not known`);
  const start = version === 1 ? 10 : 12;
  const length = version === 1 ? head.getUint16(8, true) : head.getUint32(8, true);
  if (length > Math.min(MAX_HEADER, file.size - start)) throw fault(`its header claims ${count(length)} bytes`);
  const header = await file.slice(start, start + length).text();
  const descr = /'descr'\s*:\s*'([^']*)'/.exec(header)?.[1];
  const order = /'fortran_order'\s*:\s*(True|False)/.exec(header)?.[1];
  const shapeText = /'shape'\s*:\s*\(([\d\s,]*)\)/.exec(header)?.[1];
  if (order === undefined || shapeText === undefined) throw fault("its header is not understood");
  if (descr === undefined || !Object.hasOwn(DTYPES, descr)) {
    throw fault(
      `holds ${descr === undefined ? "something else than one array" : `dtype ${shown(descr)}`}, expected floats`,
    );
  }
  if (order === "True") throw fault("lies in Fortran order, expected C order");
  const shape = shapeText
    .split(",")
    .filter((size) => size.trim())
    .map(Number);
  const elements = shape.reduce((product, size) => product * size, 1);
  const nbytes = elements * Number(descr[2]);
  if (start + length + nbytes !== file.size) {
    throw fault(
      `${descr} [${shape}] needs ${count(nbytes)} bytes of data, the file has ${count(file.size - start - length)}`,
    );
  }
  return { shape, values: floatsFrom(DTYPES[descr], await file.slice(start + length).arrayBuffer()) };
}

/**
 * Return the bytes of a .npy file of float32.
 * @param {Float32Array} values
 * @param {number[]} shape
 */
export function npyBlob(values, shape) {
  const dictionary = `{'descr': '<f4', 'fortran_order': False, 'shape': (${shape.join(", ")}${shape.length === 1 ? "," : ""}), }`;
  const text = dictionary.padEnd(Math.ceil((dictionary.length + 11) / 64) * 64 - 11) + "\n"; // data begins at a multiple of 64
  const head = new Uint8Array(10);
  head.set(Array.from(MAGIC, (c) => c.charCodeAt(0)));
  head.set([1, 0, text.length & 0xff, text.length >> 8], 6);
  const data = new DataView(new ArrayBuffer(values.length * 4));
  values.forEach((value, i) => data.setFloat32(4 * i, value, true));
  return new Blob([head, text, data], { type: "application/octet-stream" });
}
