/** sha256 of what lies in the file against what its metadata says. */

import { shown } from "./text.js";

/** Whether this page may compute digests: browsers offer that on https and localhost only. */
export const CAN_DIGEST = globalThis.crypto?.subtle !== undefined;

/**
 * Compare a weight's digests with those in the metadata.
 * @param {import("./container.js").Weight} weight
 * @returns {Promise<string[]>} what differs; empty when all is well
 */
export async function wrongDigests({ entry, packed, scaleBytes }) {
  if (!entry.said) return [];
  const { packed_sha256, scale_sha256 } = entry.said;
  const wrong = [];
  for (const [what, bytes, stated] of /** @type {const} */ ([
    ["packed bytes", packed, packed_sha256],
    ["scales", scaleBytes, scale_sha256],
  ])) {
    const found = hex(await crypto.subtle.digest("SHA-256", bytes));
    if (found !== stated)
      wrong.push(`sha256 of the ${what} of ${shown(entry.name)} is ${found}, the metadata says ${stated}`);
  }
  return wrong;
}

/** @param {ArrayBuffer} bytes */
function hex(bytes) {
  return Array.from(new Uint8Array(bytes), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
