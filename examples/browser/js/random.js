/** Seeded numbers, the same in every browser: whole-number arithmetic and exact sums only, no logarithms or sines. */

/** @typedef {() => number} Draw a function that returns the next number in [0, 1), a multiple of 2^-32 */

/**
 * Return a generator (mulberry32).
 * @param {number} seed a whole number from 0 to 2^32 - 1
 * @returns {Draw}
 */
export function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/**
 * Return numbers of mean 0 and variance 1, nearly normal: sums of twelve uniform ones.
 * @param {number} length
 * @param {Draw} draw
 */
export function nearlyNormal(length, draw) {
  return Float32Array.from({ length }, () => {
    let sum = -6;
    for (let i = 0; i < 12; i++) sum += draw();
    return sum;
  });
}

/**
 * Return small non-zero integers from -4 to 4.
 * @param {number} length
 * @param {Draw} draw
 */
export function smallIntegers(length, draw) {
  return Float32Array.from({ length }, () => {
    const value = Math.floor(draw() * 8);
    return value < 4 ? value - 4 : value - 3;
  });
}
