/** Little-endian bytes of the float dtypes -> float32. */

/** How many bytes a value has and how it is read, by safetensors' names. @type {Record<string, [number, (view: DataView, at: number) => number]>} */
const READERS = {
  F64: [8, (view, at) => view.getFloat64(at, true)],
  F32: [4, (view, at) => view.getFloat32(at, true)],
  F16: [2, (view, at) => halfToNumber(view.getUint16(at, true))],
  BF16: [2, bfloat],
};

/** The dtypes that are floats. */
export const FLOAT_DTYPES = Object.keys(READERS);

/**
 * @param {string} dtype one of FLOAT_DTYPES
 * @param {ArrayBuffer} bytes
 */
export function floatsFrom(dtype, bytes) {
  const [nbytes, read] = READERS[dtype];
  const view = new DataView(bytes);
  return Float32Array.from({ length: bytes.byteLength / nbytes }, (_, i) => read(view, i * nbytes));
}

/** A bfloat16 is the upper half of a float32. @param {DataView} view @param {number} at */
function bfloat(view, at) {
  const word = new DataView(new ArrayBuffer(4));
  word.setUint16(0, view.getUint16(at, true));
  return word.getFloat32(0);
}

/** @param {number} bits of a float16 */
function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
}
