/**
 * A kernel: a .wgsl file and what its text says about itself.
 *
 * Tile sizes, workgroup sizes, bindings and the grid stand in the WGSL only; the page reads them out, as the command
 * line does (gpu/qcs4w_gpu/kernel.py), from the very same files.
 */

import { PageError } from "./errors.js";
import { evaluate } from "./expression.js";
import { shown } from "./text.js";

/** Kernels of the linear, all of the same contract, the readable truth first. */
export const LINEAR_KERNELS = ["linear_naive", "linear_gemv", "linear_tiled"];

const FOLDER = new URL("../../../gpu/qcs4w_gpu/kernels/", import.meta.url);
const MOST_BYTES = 2 ** 20;
const MOST_OF_A_KIND = 1000;
const DEEPEST = 100;
const PARAMS_BINDING = 4;

/** An attribute's argument may hold calls, as in @workgroup_size(max(A, B)). */
const ATTRIBUTES = String.raw`(?<attributes>(?:@\w+(?:\s*\((?:[^()]|\([^()]*\))*\))?\s*)+)`;
const BINDING = new RegExp(ATTRIBUTES + String.raw`var\s*<\s*(?<space>\w+)\s*(?:,\s*(?<access>\w+)\s*)?,?\s*>`, "g");
const ENTRY = new RegExp(ATTRIBUTES + String.raw`fn\s+(?<name>\w+)`, "g");
const CONSTANT = /\b(?:const|override)\s+(\w+)\s*(?::\s*u32\s*)?=\s*([^;]+);/g;

/** What a linear's bindings have to be. @type {ReadonlyMap<number, GPUBufferBindingType>} */
const LINEAR_BINDINGS = new Map([
  [0, "storage"],
  [1, "read-only-storage"],
  [2, "read-only-storage"],
  [3, "read-only-storage"],
  [PARAMS_BINDING, "uniform"],
]);

/**
 * @typedef {object} Kernel
 * @property {string} name of the file, without its suffix
 * @property {string} source WGSL
 * @property {string} entryPoint
 * @property {ReadonlyMap<number, GPUBufferBindingType>} bindings of group 0
 * @property {ReadonlyMap<string, number>} constants the file's u32 constants
 * @property {string} grid how many workgroups, an expression of M, N, K, K_packed and the constants
 * @property {number} rowAlign K_packed must be a multiple of so many bytes
 * @property {number} xAlign a row of x takes K floats rounded up to a multiple of so many
 */

/** @type {Map<string, Promise<Kernel>>} */
const fetched = new Map();

/**
 * Return one of the project's own kernels, fetched once from the folder where all of qcs4w has them.
 * @param {string} name
 * @returns {Promise<Kernel>}
 */
export function shippedKernel(name) {
  const known = fetched.get(name) ?? fetchKernel(name);
  fetched.set(name, known);
  known.catch(() => fetched.delete(name)); // so that it is tried again
  return known;
}

/** @param {string} name */
async function fetchKernel(name) {
  const url = new URL(`${name}.wgsl`, FOLDER);
  const mend =
    "The kernels are those of the project, not copies. Serve the folder of the whole checkout: " +
    "python -m http.server in it, then open /examples/browser/ there.";
  let response;
  try {
    response = await fetch(url);
  } catch {
    throw new PageError(`kernel '${name}' cannot be fetched from ${url.pathname}: the server does not answer`, mend);
  }
  if (!response.ok)
    throw new PageError(`kernel '${name}' cannot be fetched from ${url.pathname}: ${response.status}`, mend);
  return parseKernel(name, await response.text());
}

/**
 * Read a kernel of the person's own.
 * @param {File} file
 */
export async function readKernel(file) {
  if (file.size > MOST_BYTES)
    throw new PageError(`${shown(file.name)}: has ${file.size} bytes, expected ${MOST_BYTES} at most`);
  const kernel = parseKernel(file.name.replace(/\.wgsl$/i, ""), await file.text());
  checkLinear(kernel);
  return kernel;
}

/**
 * Read from WGSL what the host needs to know.
 * @param {string} name
 * @param {string} source
 * @returns {Kernel}
 * @throws {PageError} an entry point, the `//! grid` line or a binding is missing or not understood
 */
export function parseKernel(name, source) {
  const where = `kernel '${shown(name)}'`;
  const { code, comments } = splitComments(source);
  checkSize(code, where);
  const directives = directivesOf(comments, where);
  const entries = [...code.matchAll(ENTRY)].filter((entry) => attribute(entry, "compute") !== null);
  if (entries.length !== 1) throw new PageError(`${where} has ${entries.length} @compute entry points, expected one`);
  const grid = directives.get("grid");
  if (grid === undefined) {
    throw new PageError(
      `${where} does not say how many workgroups it needs`,
      "Add a line such as: //! grid = ceil(M * N / 64)",
    );
  }
  /** @type {Map<string, number>} */
  const constants = new Map();
  for (const [, constant, expression] of moduleScope(code).matchAll(CONSTANT)) {
    try {
      constants.set(constant, evaluate(expression, constants, constant));
    } catch {
      // A constant of another type; it is missed only where an expression needs it.
    }
  }
  /** @type {Map<number, GPUBufferBindingType>} */
  const bindings = new Map();
  for (const found of code.matchAll(BINDING)) {
    const [group, binding] = [attribute(found, "group"), attribute(found, "binding")];
    if (group === null || binding === null) continue;
    if (evaluate(group, constants, where) !== 0)
      throw new PageError(`${where} has a binding in group ${group}; group 0 is served only`);
    bindings.set(evaluate(binding, constants, where), kindOf(found.groups?.space, found.groups?.access));
  }
  /** @param {string} directive */
  const alignment = (directive) => {
    const value = evaluate(directives.get(directive) ?? "1", constants, `${where}: ${directive}`);
    if (value < 1) throw new PageError(`${where}: ${directive} is ${value}, expected at least 1`);
    return value;
  };
  const [rowAlign, xAlign] = [alignment("row_align"), alignment("x_align")];
  return { name, source, entryPoint: entries[0].groups?.name ?? "", bindings, constants, grid, rowAlign, xAlign };
}

/**
 * Return how many workgroups a kernel needs.
 * @param {Kernel} kernel
 * @param {{M: number, N: number, K: number, K_packed: number}} sizes
 */
export function workgroups(kernel, sizes) {
  const where = `kernel '${shown(kernel.name)}': grid`;
  const total = evaluate(kernel.grid, new Map([...kernel.constants, ...Object.entries(sizes)]), where);
  if (total < 1) throw new PageError(`${where}: '${kernel.grid}' is ${total}, expected at least 1`);
  return total;
}

/** Check that a kernel has the bindings of the linear. @param {Kernel} kernel */
function checkLinear({ name, bindings, xAlign }) {
  if (xAlign > 1) {
    throw new PageError(
      `kernel '${shown(name)}' wants rows of x a multiple of ${xAlign} columns apart, which this page does not make`,
      "The command line does: qcs4w verify --kernel FILE.wgsl",
    );
  }
  const isRight =
    bindings.size === LINEAR_BINDINGS.size && [...LINEAR_BINDINGS].every(([i, kind]) => bindings.get(i) === kind);
  if (isRight) return;
  const found = [...bindings].map(([index, kind]) => `${index} ${kind}`).join(", ") || "none";
  throw new PageError(
    `kernel '${shown(name)}' has the bindings ${found}`,
    "Expected 0 output, 1 input, 2 packed weights, 3 scales, 4 uniform Params {M, N, K, K_packed: u32}.",
  );
}

/** Refuse what only serves to keep a parser busy. @param {string} code @param {string} where */
function checkSize(code, where) {
  let depth = 0;
  let deepest = 0;
  for (const [bracket] of code.matchAll(/[()[\]{}]/g)) {
    depth += "([{".includes(bracket) ? 1 : -1;
    deepest = Math.max(deepest, depth);
  }
  const most = Math.max(
    ...[/\bconst\b/g, /\boverride\b/g, /@/g, /\bvar\b/g].map((kind) => (code.match(kind) ?? []).length),
  );
  if (deepest > DEEPEST || most > MOST_OF_A_KIND) {
    throw new PageError(
      `${where} is not read: it is nested ${deepest} deep and has ${most} declarations of a kind, ` +
        `expected ${DEEPEST} and ${MOST_OF_A_KIND} at most`,
    );
  }
}

/** Split WGSL into its code and its line comments; block comments nest, and what is in them is gone. @param {string} source */
function splitComments(source) {
  const [outside, inside] = [/\/\*|\/\/[^\n]*/g, /\/\*|\*\//g];
  const code = [];
  const comments = [];
  let depth = 0;
  let at = 0;
  for (;;) {
    const pattern = depth ? inside : outside;
    pattern.lastIndex = at;
    const mark = pattern.exec(source);
    if (!mark) break;
    if (!depth) code.push(source.slice(at, mark.index));
    if (mark[0] === "/*") depth += 1;
    else if (mark[0] === "*/") depth -= 1;
    else comments.push(mark[0]);
    at = pattern.lastIndex;
  }
  if (!depth) code.push(source.slice(at));
  return { code: code.join(" "), comments };
}

/** Return what the `//!` comments say; one that is misspelt or said twice is an error, never ignored. @param {string[]} comments @param {string} where */
function directivesOf(comments, where) {
  /** @type {Map<string, string>} */
  const said = new Map();
  for (const comment of comments.filter((text) => text.startsWith("//!"))) {
    const parts = /^\/\/!\s*(grid|row_align|x_align)\s*=\s*(.+?)\s*$/.exec(comment);
    if (!parts) {
      throw new PageError(
        `${where}: the line '${shown(comment.trim())}' is not understood`,
        "The host knows //! grid = ..., //! row_align = ..., //! x_align = ...",
      );
    }
    if (said.has(parts[1])) throw new PageError(`${where} says '//! ${parts[1]}' twice`);
    said.set(parts[1], parts[2]);
  }
  return said;
}

/** Return code without what stands in braces, where a constant may have the name of a global one. @param {string} code */
function moduleScope(code) {
  let before;
  do {
    before = code;
    code = code.replace(/\{[^{}]*\}/g, ";");
  } while (code !== before);
  return code;
}

/** Return an attribute's argument, "" where it has none, or null where it is missing. @param {RegExpMatchArray} declaration @param {string} name */
function attribute(declaration, name) {
  const pattern = new RegExp(String.raw`@${name}\b(?:\s*\(((?:[^()]|\([^()]*\))*)\))?`);
  const found = pattern.exec(declaration.groups?.attributes ?? "");
  return found ? (found[1] ?? "") : null;
}

/** @param {string | undefined} space @param {string | undefined} access @returns {GPUBufferBindingType} */
function kindOf(space, access) {
  if (space === "uniform") return "uniform";
  return access === "read_write" ? "storage" : "read-only-storage";
}
