/** A fault that the page explains: what happened, where, and how to mend it. */
export class PageError extends Error {
  /**
   * @param {string} message what and where
   * @param {string} [hint] how to mend it
   */
  constructor(message, hint = "") {
    super(message);
    this.name = "PageError";
    this.hint = hint;
  }
}

/** Thrown where work stops because the person asked for it, or because something newer took its place. */
export class Stopped extends Error {}
