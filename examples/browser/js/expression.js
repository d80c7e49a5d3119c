/** Whole-number arithmetic as the kernels' head comments write it: + - * / %, ceil, min, max, numbers and names. */

import { PageError } from "./errors.js";

const LONGEST = 1000;
const LARGEST = 1n << 128n;

/** An exact fraction; its denominator is positive. @typedef {{over: bigint, under: bigint}} Fraction */

/**
 * Evaluate an expression. `/` is exact inside `ceil` and rounds down elsewhere, as it does for u32 in WGSL.
 * @param {string} text
 * @param {ReadonlyMap<string, number>} names
 * @param {string} where for messages
 * @returns {number} a whole number
 * @throws {PageError} it is not understood, or has a name that is not known
 */
export function evaluate(text, names, where) {
  const fault = (/** @type {string} */ why) =>
    new PageError(`${where}: cannot evaluate '${text.slice(0, 100)}': ${why}`);
  if (text.length > LONGEST) throw fault(`it has ${text.length} characters, expected ${LONGEST} at most`);
  const tokens = text.match(/0[xX][0-9a-fA-F]+[iu]?\b|\d+[iu]?\b|[A-Za-z_]\w*|\S/g) ?? [];
  let at = 0;

  const next = () => tokens[at++];
  /** @param {string} token */
  const expect = (token) => {
    const found = next();
    if (found !== token) throw fault(`'${found ?? "its end"}' stands where '${token}' was expected`);
  };

  /** @param {boolean} exact @returns {Fraction} */
  function sum(exact) {
    let left = product(exact);
    while (tokens[at] === "+" || tokens[at] === "-") {
      const sign = next() === "+" ? 1n : -1n;
      const right = product(exact);
      left = { over: left.over * right.under + sign * right.over * left.under, under: left.under * right.under };
    }
    return left;
  }

  /** @param {boolean} exact @returns {Fraction} */
  function product(exact) {
    let left = operand(exact);
    while (["*", "/", "%"].includes(tokens[at])) {
      const operator = next();
      const right = operand(exact);
      if (operator === "*") {
        left = { over: left.over * right.over, under: left.under * right.under };
        continue;
      }
      if (right.over === 0n) throw fault("division by zero");
      const quotient = divide(left, right);
      if (operator === "/") left = exact ? quotient : whole(floor(quotient));
      else {
        const times = floor(quotient);
        left = { over: left.over * right.under - times * right.over * left.under, under: left.under * right.under };
      }
    }
    return left;
  }

  /** @param {boolean} exact @returns {Fraction} */
  function operand(exact) {
    const token = next() ?? "";
    if (/^\d/.test(token)) return whole(BigInt(token.replace(/[iu]$/, "")));
    if (token === "(") {
      const value = sum(exact);
      expect(")");
      return value;
    }
    if (["ceil", "min", "max"].includes(token) && tokens[at] === "(") {
      next();
      const values = [sum(exact || token === "ceil")];
      while (tokens[at] === "," && token !== "ceil") {
        next();
        values.push(sum(exact));
      }
      expect(")");
      if (token === "ceil") return whole(-floor({ over: -values[0].over, under: values[0].under }));
      const [first, ...rest] = values;
      return rest.reduce((best, value) => (isLess(value, best) === (token === "min") ? value : best), first);
    }
    const value = names.get(token);
    if (value === undefined) throw fault(`'${token || "its end"}' is not known`);
    return whole(BigInt(value));
  }

  const result = floor(sum(false));
  if (at < tokens.length) throw fault(`'${tokens[at]}' is not understood`);
  if (result > LARGEST || result < -LARGEST) throw fault("it is beyond 128 bits");
  return Number(result);
}

/** @param {bigint} value @returns {Fraction} */
function whole(value) {
  return { over: value, under: 1n };
}

/** @param {Fraction} a @param {Fraction} b @returns {Fraction} */
function divide(a, b) {
  const sign = b.over < 0n ? -1n : 1n;
  return { over: sign * a.over * b.under, under: sign * a.under * b.over };
}

/** @param {Fraction} value */
function floor({ over, under }) {
  const quotient = over / under; // rounds towards zero
  return over < 0n && quotient * under !== over ? quotient - 1n : quotient;
}

/** @param {Fraction} a @param {Fraction} b */
function isLess(a, b) {
  return a.over * b.under < b.over * a.under;
}
