/**
 * The qcs4w container: a safetensors file that says how its bytes are to be read.
 *
 * A weight T is T.qcs4w_packed (U8 [N, ceil(K/2)]), T.qcs4w_scale (F32 [N]) and T.qcs4w_shape (I64 [2] = N, K); the
 * metadata key `qcs4w` is a JSON document. Like `qcs4w inspect`, the page opens broken ones too: it tells what a
 * reader refuses, shows what it can, and runs nothing of them.
 */

import { PageError } from "./errors.js";
import { isObject, isUnicode, parseJson } from "./json.js";
import { LAYOUTS, OFFSET, packedWidth } from "./nibbles.js";
import { openSafetensors, readBytes } from "./safetensors.js";
import { count, quoted, shellWord, shown } from "./text.js";

const METADATA_KEY = "qcs4w";
const VERSION = 1;
const [PACKED, SCALE, SHAPE] = [".qcs4w_packed", ".qcs4w_scale", ".qcs4w_shape"];
const READ_AT_ONCE = 64;
/** How the names of other tools' packed tensors end: compressed-tensors, GPTQ and AWQ, q4gsw. */
const FOREIGN = /\.(weight_packed|qweight|q4gsw_packed)$/;

/**
 * What a container says of one packed tensor.
 * @typedef {object} PackedEntry
 * @property {string} name
 * @property {number} outFeatures N
 * @property {number} inFeatures K
 * @property {number} width K_packed, the bytes of one row in the file
 * @property {{source_dtype: string, method: string, transposed: boolean, aliases: string[], packed_sha256: string,
 *   scale_sha256: string} | null} said its description, null where there is no sound one
 */

/**
 * A packed weight in memory.
 * @typedef {object} Weight
 * @property {PackedEntry} entry
 * @property {Uint8Array<ArrayBuffer>} packed N · K_packed bytes
 * @property {Float32Array} scales N
 * @property {Uint8Array<ArrayBuffer>} scaleBytes the scales as they lie in the file
 */

/** A sound safetensors file without anything packed in it. */
export class NotPackedError extends PageError {}

export class Container {
  #slots;

  /**
   * @param {import("./safetensors.js").SafetensorsFile} opened
   */
  constructor(opened) {
    this.file = opened.file;
    this.#slots = opened.slots;
    /** What a reader refuses. @type {string[]} */
    this.problems = [];
    /** @type {Map<string, PackedEntry>} */
    this.entries = new Map();
    /** @type {Record<string, unknown>} */
    this.document = this.#readDocument(opened.metadata.get(METADATA_KEY));
  }

  /**
   * Open a container, sound or not.
   * @param {File} file
   * @throws {PageError} not a sound safetensors file, or one without anything of ours in it
   */
  static async open(file) {
    const opened = await openSafetensors(file);
    if (!opened.metadata.has(METADATA_KEY) && ![...opened.slots.keys()].some((name) => name.endsWith(PACKED))) {
      const isForeign = [...opened.slots.keys()].some((name) => FOREIGN.test(name));
      throw new NotPackedError(
        `${shown(file.name)}: is a safetensors file of ${count(opened.slots.size)} tensors, ` +
          (isForeign ? "which another tool has packed" : "but nothing in it is packed"),
        `${isForeign ? "Bring it here: qcs4w convert" : "Pack it first: qcs4w pack"} ` +
          `${shellWord(shown(file.name))} -o packed.safetensors`,
      );
    }
    const container = new Container(opened);
    await container.#readEntries();
    return container;
  }

  /** How many tensors are carried along as they were. */
  get carried() {
    return this.#slots.size - 3 * this.entries.size;
  }

  /** Return the name of a bias that the file holds for a weight, or null. @param {PackedEntry} entry */
  biasName({ name }) {
    const bias = name.endsWith("weight") ? `${name.slice(0, -"weight".length)}bias` : `${name}.bias`;
    return this.#slots.has(bias) ? bias : null;
  }

  /** Return where a row's first byte lies in the file. @param {PackedEntry} entry @param {number} row */
  rowOffset(entry, row) {
    return this.#slot(entry.name + PACKED).start + row * entry.width;
  }

  /**
   * Read some bytes of one row.
   * @param {PackedEntry} entry
   * @param {number} row
   * @param {number} first
   * @param {number} end
   */
  rowBytes(entry, row, first, end) {
    return readBytes(this.file, this.rowOffset(entry, row) + first, end - first);
  }

  /** Read the scales of some rows. @param {PackedEntry} entry @param {number} first @param {number} end */
  async scales(entry, first, end) {
    return floatsOf(await readBytes(this.file, this.#slot(entry.name + SCALE).start + 4 * first, 4 * (end - first)));
  }

  /**
   * Read a weight whole.
   * @param {PackedEntry} entry
   * @param {import("./progress.js").Progress} progress
   * @returns {Promise<Weight>}
   */
  async load(entry, progress) {
    const [codes, scales] = [this.#slot(entry.name + PACKED), this.#slot(entry.name + SCALE)];
    const packed = await readBytes(this.file, codes.start, codes.nbytes, progress);
    const scaleBytes = await readBytes(this.file, scales.start, scales.nbytes);
    return { entry, packed, scaleBytes, scales: floatsOf(scaleBytes) };
  }

  /** @param {string} name */
  #slot(name) {
    const slot = this.#slots.get(name);
    if (!slot) throw new PageError(`${shown(this.file.name)}: ${shown(name)} is missing`);
    return slot;
  }

  /** @param {string | undefined} text @returns {Record<string, unknown>} */
  #readDocument(text) {
    if (text === undefined) {
      this.problems.push(`has packed tensors but no '${METADATA_KEY}' metadata, so that their layout is unknown`);
      return {};
    }
    let document;
    try {
      document = parseJson(text);
    } catch (error) {
      this.problems.push(`its '${METADATA_KEY}' metadata is not JSON (${shown(String(error))})`);
      return {};
    }
    if (!isObject(document) || !isObject(document.tensors)) {
      this.problems.push(`its '${METADATA_KEY}' metadata is not an object with 'tensors'`);
      return {};
    }
    if (document.version !== VERSION) {
      this.problems.push(
        `has container version ${quoted(document.version)}, this page reads ${VERSION}: a newer qcs4w may read it`,
      );
    }
    for (const [key, expected] of /** @type {const} */ ([
      ["nibble_order", LAYOUTS[0].name],
      ["offset", OFFSET],
    ])) {
      if (document[key] !== expected) {
        this.problems.push(`states ${key} ${quoted(document[key])}, this page reads ${quoted(expected)}`);
      }
    }
    return document;
  }

  async #readEntries() {
    const stored = [...this.#slots.keys()]
      .filter((name) => name.endsWith(PACKED))
      .map((n) => n.slice(0, -PACKED.length));
    const described = isObject(this.document.tensors) ? this.document.tensors : null;
    if (described) {
      for (const name of Object.keys(described)) {
        if (!this.#slots.has(name + PACKED)) {
          this.problems.push(
            `tensor ${quoted(name)} is described in the metadata but ${shown(name + PACKED)} is missing`,
          );
        }
      }
      if (!stored.length) this.problems.push("holds no packed tensor");
    }
    for (let at = 0; at < stored.length; at += READ_AT_ONCE) {
      const names = stored.slice(at, at + READ_AT_ONCE);
      const entries = await Promise.all(names.map((name) => this.#readEntry(name, described)));
      for (const entry of entries) if (entry) this.entries.set(entry.name, entry);
    }
    this.#checkAliases();
  }

  #checkAliases() {
    const names = new Map([...this.entries.keys()].map((name) => [name, name]));
    for (const [name, { said }] of this.entries) {
      for (const alias of said?.aliases ?? []) {
        const other = names.get(alias) ?? name;
        if (other !== name)
          this.problems.push(`${quoted(alias)} is an alias of tensor ${quoted(name)} and of ${quoted(other)}`);
        names.set(alias, name);
      }
    }
  }

  /**
   * @param {string} name
   * @param {Record<string, unknown> | null} described
   * @returns {Promise<PackedEntry | null>}
   */
  async #readEntry(name, described) {
    const refuse = (/** @type {string} */ message) => {
      this.problems.push(message);
      return null;
    };
    const scale = this.#slots.get(name + SCALE);
    const shape = this.#slots.get(name + SHAPE);
    if (!scale || !shape) return refuse(`tensor ${quoted(name)}: ${shown(name + (scale ? SHAPE : SCALE))} is missing`);
    if (shape.dtype !== "I64" || String(shape.shape) !== "2") {
      return refuse(`${shown(name + SHAPE)} is ${shape.dtype} ${quoted(shape.shape)}, expected I64 [2]`);
    }
    const view = new DataView((await readBytes(this.file, shape.start, 16)).buffer);
    const [rows, columns] = [0, 8].map((at) => Number(view.getBigInt64(at, true)));
    const width = packedWidth(columns);
    for (const [suffix, dtype, expected] of /** @type {const} */ ([
      [PACKED, "U8", [rows, width]],
      [SCALE, "F32", [rows]],
    ])) {
      const slot = this.#slot(name + suffix);
      if (rows < 1 || columns < 1 || slot.dtype !== dtype || String(slot.shape) !== String(expected)) {
        return refuse(
          `${shown(name + suffix)} is ${slot.dtype} ${quoted(slot.shape)}, ` +
            `expected ${dtype} ${quoted(expected)} for N ${rows}, K ${columns}`,
        );
      }
    }
    const entry = { name, outFeatures: rows, inFeatures: columns, width, said: null };
    if (!described) return entry;
    if (!Object.hasOwn(described, name)) {
      this.problems.push(`tensor ${quoted(name)} is packed but not described in the metadata`);
      return entry;
    }
    const fault = faultOf(described[name]);
    if (fault) this.problems.push(`tensor ${quoted(name)}: its description in the metadata is not sound (${fault})`);
    return fault ? entry : { ...entry, said: descriptionOf(/** @type {any} */ (described[name])) };
  }
}

/** Return little-endian bytes as floats. @param {Uint8Array<ArrayBuffer>} bytes */
function floatsOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

/** Say what is wrong with a tensor's description, or return null. @param {unknown} said */
function faultOf(said) {
  if (!isObject(said)) return "not an object";
  const aliases = said.aliases ?? [];
  if (!Array.isArray(aliases) || !aliases.every((alias) => typeof alias === "string"))
    return "aliases are not a list of names";
  const texts = [said.source_dtype, said.method, said.packed_sha256, said.scale_sha256];
  if (!texts.every((text) => typeof text === "string")) return "a text is missing";
  if (![...texts, ...aliases].every((text) => isUnicode(String(text)))) return "a text is not valid Unicode";
  const digests = [said.packed_sha256, said.scale_sha256];
  return digests.every((digest) => /^[0-9a-f]{64}$/.test(String(digest)))
    ? null
    : "a digest is not the hex of a sha256";
}

/** @param {any} said a sound description */
function descriptionOf({ source_dtype, method, transposed, aliases = [], packed_sha256, scale_sha256 }) {
  return { source_dtype, method, transposed: transposed === true, aliases, packed_sha256, scale_sha256 };
}
