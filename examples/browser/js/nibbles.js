/** Codes out of bytes: the page's one place that knows nibble order, offset and padding. */

export const OFFSET = 8; // stored nibble = code + OFFSET
export const PAD_BYTE = (OFFSET << 4) | OFFSET; // two codes of zero

/**
 * How two 4-bit codes lie in a byte.
 * @typedef {object} Layout
 * @property {string} name what the command line calls it
 * @property {boolean} evenHigh the even column is in bits 4..7 (else in bits 0..3)
 * @property {boolean} twosComplement a nibble is the code's two's complement (else code + 8)
 */

/** Every layout that can be read; the first is qcs4w's own. @type {readonly Layout[]} */
export const LAYOUTS = [
  { name: "even-high", evenHigh: true, twosComplement: false },
  { name: "even-low", evenHigh: false, twosComplement: false },
  { name: "even-high-twos", evenHigh: true, twosComplement: true },
  { name: "even-low-twos", evenHigh: false, twosComplement: true },
];

/** Return K_packed, the bytes of one packed row. @param {number} inFeatures K */
export function packedWidth(inFeatures) {
  return Math.floor((inFeatures + 1) / 2);
}

/** Tell whether column k lies in the high half of its byte. @param {number} k @param {Layout} layout */
export function isHigh(k, layout) {
  return (k % 2 === 0) === layout.evenHigh;
}

/**
 * Return the nibble of column k, 0..15.
 * @param {number} byte the one that holds it
 * @param {number} k
 * @param {Layout} layout
 */
export function nibbleAt(byte, k, layout) {
  return isHigh(k, layout) ? byte >> 4 : byte & 0xf;
}

/** Return the signed code of a nibble, -8..7. @param {number} nibble @param {Layout} layout */
export function codeOf(nibble, layout) {
  if (!layout.twosComplement) return nibble - OFFSET;
  return nibble > 7 ? nibble - 16 : nibble;
}
