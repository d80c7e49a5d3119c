/** Elements without markup in strings: whatever a file says becomes text and never HTML. */

/**
 * Return the element of an id that stands in index.html.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function byId(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`index.html has no ${kind.name} #${id}`);
  return found;
}

/**
 * Make an element.
 * @param {string} tag
 * @param {Record<string, string | number | boolean>} [properties] properties of the element, or attributes of other names
 * @param {...(Node | string)} children
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) Object.assign(made, { [name]: value });
    else made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/**
 * Make the rows of a description list.
 * @param {[string, string | Node][]} pairs
 */
export function descriptions(pairs) {
  return element(
    "dl",
    {},
    ...pairs.map(([term, said]) => element("div", {}, element("dt", {}, term), element("dd", {}, said))),
  );
}

/**
 * Make a message with its hint.
 * @param {"error" | "warning"} kind
 * @param {string} message
 * @param {string} [hint]
 * @param {string[]} [items] details, one a line
 */
export function notice(kind, message, hint = "", items = []) {
  const parts = [element("p", {}, element("strong", {}, kind === "error" ? "Error: " : "Warning: "), message)];
  if (items.length) parts.push(element("ul", {}, ...items.map((item) => element("li", {}, item))));
  if (hint) parts.push(element("p", { className: "hint" }, hint));
  return element("div", { className: "notice", "data-kind": kind }, ...parts);
}

/** Offer a blob as a download. @param {string} name @param {() => Blob} make */
export function downloadButton(name, make) {
  const button = element("button", { type: "button" }, `Download ${name}`);
  button.addEventListener("click", () => {
    const url = URL.createObjectURL(make());
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  });
  return button;
}
