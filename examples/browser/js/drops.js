/** Files that are dragged over the page and dropped on it. */

/**
 * Take files that are dropped anywhere on the page, and show while they are over it.
 * @param {(files: File[]) => unknown} take
 */
export function listenToDrops(take) {
  let depth = 0; // of nested elements that the file is over
  const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
  const show = () => {
    if (depth > 0) document.body.dataset.drag = "over";
    else delete document.body.dataset.drag;
  };
  addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth++;
    show();
  });
  addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  addEventListener("dragleave", (event) => {
    if (!hasFiles(event)) return;
    depth = Math.max(0, depth - 1);
    show();
  });
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    show();
    take([...(event.dataTransfer?.files ?? [])]);
  });
}
