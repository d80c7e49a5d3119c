/** Dumps of packed bytes, as `qcs4w inspect --tensor` makes them: a rectangle of a tensor -> nibbles, codes, values. */

import { codeOf, isHigh, nibbleAt } from "./nibbles.js";

/**
 * One column of a row; of the pad nibble of an odd K only k, byte and nibble mean something.
 * @typedef {object} Cell
 * @property {number} k
 * @property {number} byte
 * @property {boolean} high which half of the byte it is
 * @property {number} nibble 0..15
 * @property {number} code -8..7
 * @property {number} value code · scale
 * @property {boolean} isPad it lies behind the last column
 */

/**
 * @typedef {object} DumpRow
 * @property {number} row n
 * @property {number} scale
 * @property {number} fileOffset where the row's first packed byte lies in the file
 * @property {Cell[]} cells
 */

/**
 * Read a rectangle of a tensor whatever its digest says; only the bytes that are shown are read.
 * @param {import("./container.js").Container} container
 * @param {import("./container.js").PackedEntry} entry
 * @param {{start: number, stop: number}} rows within 0..N
 * @param {{start: number, stop: number}} columns within 0..K
 * @param {import("./nibbles.js").Layout} layout
 * @returns {Promise<DumpRow[]>}
 */
export async function dumpOf(container, entry, rows, columns, layout) {
  const scales = await container.scales(entry, rows.start, rows.stop);
  const firstByte = Math.floor(columns.start / 2);
  const endByte = Math.ceil(columns.stop / 2);
  const wanted = Array.from({ length: rows.stop - rows.start }, async (_, i) => {
    const row = rows.start + i;
    const bytes = await container.rowBytes(entry, row, firstByte, endByte);
    // An odd K ends in a byte that has a nibble more.
    const last = columns.stop === entry.inFeatures ? endByte * 2 : columns.stop;
    const cells = [];
    for (let k = columns.start; k < last; k++) {
      const byte = bytes[Math.floor(k / 2) - firstByte];
      const nibble = nibbleAt(byte, k, layout);
      const code = codeOf(nibble, layout);
      const isPad = k >= entry.inFeatures;
      cells.push({ k, byte, high: isHigh(k, layout), nibble, code, value: code * scales[i], isPad });
    }
    return { row, scale: scales[i], fileOffset: container.rowOffset(entry, row), cells };
  });
  return Promise.all(wanted);
}
