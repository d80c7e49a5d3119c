/** JSON out of files that anybody may have made. */

import { quoted } from "./text.js";

/**
 * Parse JSON; a key that occurs twice in one object is an error, as two readers may take different ones of them.
 * @param {string} text
 * @returns {unknown}
 * @throws {SyntaxError}
 */
export function parseJson(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    // A RangeError where an engine's parser runs out of stack; and no text of megabytes in the message.
    throw new SyntaxError(String(error instanceof Error ? error.message : error).slice(0, 200));
  }
  checkKeys(text);
  return value;
}

/** Tell an object from an array, null and the rest. @param {unknown} value @returns {value is Record<string, unknown>} */
export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Tell whether a text has no lone surrogates, which JSON can spell and UTF-8 cannot. @param {string} text */
export function isUnicode(text) {
  return !/\p{Cs}/u.test(text);
}

/**
 * Compare the keys of each object in a text that is known to be JSON.
 * Character by character: a regular expression runs out of stack on strings of megabytes.
 * @param {string} text
 */
function checkKeys(text) {
  /** @type {(Set<string> | null)[]} */
  const open = []; // the keys of every object that is open, null for an array
  for (let at = 0; at < text.length; at++) {
    const character = text[at];
    if (character === "{") open.push(new Set());
    else if (character === "[") open.push(null);
    else if (character === "}" || character === "]") open.pop();
    else if (character === '"') {
      const end = endOfString(text, at);
      if (isFollowedByColon(text, end)) {
        const key = JSON.parse(text.slice(at, end + 1));
        const keys = open[open.length - 1];
        if (keys?.has(key)) throw new SyntaxError(`key ${quoted(key)} occurs twice`);
        keys?.add(key);
      }
      at = end;
    }
  }
}

/** Return the place of a string's closing quote. @param {string} text @param {number} start of its opening one */
function endOfString(text, start) {
  let end = start;
  let backslashes;
  do {
    end = text.indexOf('"', end + 1);
    backslashes = 0;
    while (text[end - 1 - backslashes] === "\\") backslashes++;
  } while (backslashes % 2 === 1);
  return end;
}

/** @param {string} text @param {number} at */
function isFollowedByColon(text, at) {
  do at++;
  while (" \t\n\r".includes(text[at]));
  return text[at] === ":";
}
