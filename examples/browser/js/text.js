/** Numbers and names as people read them, spelled as the command line spells them. */

const LONGEST_NAME = 200;

/**
 * Return a name with control characters and direction marks spelled out, and cut to a length that fits a page.
 * A tensor's name comes from a file that anybody may have made: it must not forge lines or turn text around.
 * @param {string} name
 */
export function shown(name) {
  const cut = name.length > LONGEST_NAME ? `${name.slice(0, LONGEST_NAME)}…` : name;
  return cut.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0)?.toString(16)}}`);
}

/**
 * Return a value out of a file as a message can show it: a hostile header may hold megabytes.
 * @param {unknown} value
 */
export function quoted(value) {
  return shown(typeof value === "string" ? `'${value}'` : (JSON.stringify(value) ?? String(value)));
}

/** Return 1,234,567. @param {number} value */
export function count(value) {
  return value.toLocaleString("en-US");
}

/** Return "1 row", "2 rows". @param {number} value @param {string} noun */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Return a number of bytes for people: 1.5 MiB. @param {number} nbytes */
export function size(nbytes) {
  let value = nbytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

/**
 * Return a number with so many digits that count, as printf's %g does.
 * @param {number} value
 * @param {number} [digits]
 */
export function general(value, digits = 4) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return Object.is(value, -0) ? "-0" : "0";
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const power = Number(exponent);
  if (power >= -4 && power < digits) return withoutZeros(value.toFixed(digits - 1 - power));
  return `${withoutZeros(mantissa)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

/** @param {string} text */
function withoutZeros(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Return a word as a POSIX shell reads it back. @param {string} word */
export function shellWord(word) {
  return /^[\w./@%+=:,-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}
