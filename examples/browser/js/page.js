/** The page: what is open, what was chosen, and what happens when. */

import { Container, NotPackedError } from "./container.js";
import { CAN_DIGEST, wrongDigests } from "./digest.js";
import { byId, element, notice } from "./dom.js";
import { PageError, Stopped } from "./errors.js";
import { Gpu, NoGpuError, adapterName, findAdapter, isSoftware } from "./gpu.js";
import { browserHelp } from "./help.js";
import { holdsInput, isNpy, randomInput, readInput } from "./input.js";
import { LINEAR_KERNELS, readKernel, shippedKernel } from "./kernel.js";
import { Progress } from "./progress.js";
import { count, plural, shown } from "./text.js";
import { verify } from "./verify.js";
import { DumpView } from "./view_dump.js";
import { entryFacts, fileFacts, fileProblems, fillTensorList } from "./view_file.js";
import { verdictView } from "./view_verdict.js";

// Digests of larger tensors are checked when they are run, not whenever they are looked at.
const DIGEST_AT_ONCE = 64 * 2 ** 20;
const FILTER_FROM = 9;
const EVERY_KERNEL = "each of qcs4w's kernels";

/** @type {Container | null} */
let container = null;
/** @type {import("./container.js").PackedEntry | null} */
let entry = null;
/** The weight that was read last. @type {import("./container.js").Weight | null} */
let weight = null;
/** @type {Gpu | null} */
let gpu = null;
/** @type {File | null} */
let xFile = null;
/** @type {import("./kernel.js").Kernel | null} */
let ownKernel = null;
/** Ends the run that is going on. */
let work = new AbortController();
/** Ends what is read of a tensor that nobody looks at any more. */
let look = new AbortController();
/** The last run: the next one begins when it has let go of the device. */
let running = Promise.resolve();

const dumpView = new DumpView();

/** Take files as they come: packed files are opened, .npy is x, .wgsl is a kernel. @param {Iterable<File>} files */
async function takeFiles(files) {
  for (const file of files) {
    try {
      byId("problem", HTMLElement).replaceChildren();
      if (file.name.toLowerCase().endsWith(".wgsl")) takeKernel(await readKernel(file));
      else if (isNpy(file)) takeInput(file);
      else await open(file);
    } catch (error) {
      if (error instanceof NotPackedError && entry && (await holdsInput(file, entry))) takeInput(file);
      else showProblem(error);
    }
  }
}

/** @param {File} file */
async function open(file) {
  stop();
  let opened;
  try {
    opened = await Container.open(file);
  } catch (error) {
    if (!(error instanceof NotPackedError && container)) close();
    throw error;
  }
  container = opened;
  weight = null;
  xFile = null;
  byId("x-random", HTMLInputElement).checked = true;
  byId("file-title", HTMLElement).textContent = shown(file.name);
  byId("file-facts", HTMLElement).textContent = fileFacts(container);
  byId("file-problems", HTMLElement).replaceChildren(...fileProblems(container));
  byId("filter", HTMLInputElement).value = "";
  byId("filter-line", HTMLElement).hidden = container.entries.size < FILTER_FROM;
  byId("work", HTMLElement).hidden = false;
  byId("empty", HTMLElement).hidden = true;
  document.body.dataset.file = "open";
  byId("drop-title", HTMLElement).textContent =
    "Drop another packed file, an x (.npy, .safetensors) or a kernel (.wgsl)";
  const [first] = container.entries.values();
  const parts = ["file-card", "run-card", "dump-card"].map((id) => byId(id, HTMLElement));
  parts[1].hidden = parts[2].hidden = byId("tensors", HTMLElement).hidden = !first;
  fillTensorList(byId("tensor-list", HTMLElement), container, "", first?.name ?? null);
  if (first) await choose(first);
  else byId("entry", HTMLElement).replaceChildren();
  announce(`${shown(file.name)} is open: ${plural(container.entries.size, "packed tensor")}`);
}

/** Show nothing of a file any more. */
function close() {
  container = entry = weight = xFile = null;
  byId("work", HTMLElement).hidden = true;
  byId("empty", HTMLElement).hidden = false;
  delete document.body.dataset.file;
}

/** @param {import("./container.js").PackedEntry} chosen */
async function choose(chosen) {
  if (!container) return;
  stop();
  look.abort();
  look = new AbortController();
  entry = chosen;
  byId("result", HTMLElement).replaceChildren(placeholder());
  showXFile();
  const digest = element("span", { id: "digest" });
  byId("entry", HTMLElement).replaceChildren(entryFacts(container, entry, digest));
  await Promise.all([dumpView.show(container, entry), showDigest(container, entry, digest)]);
}

/** @param {Container} from @param {import("./container.js").PackedEntry} of @param {HTMLElement} place */
async function showDigest(from, of, place) {
  const say = (/** @type {string} */ state, /** @type {string} */ text) => {
    place.dataset.state = state;
    place.textContent = text;
  };
  if (!of.said) return say("none", "none in the metadata");
  if (!CAN_DIGEST) return say("none", "not checked: browsers offer sha256 on https and localhost only");
  if (of.outFeatures * of.width > DIGEST_AT_ONCE) return say("none", "checked when it is run");
  say("wait", "checking …");
  try {
    const wrong = await wrongDigests(await weightOf(from, of, new Progress(() => {}, look.signal)));
    if (!wrong.length) return say("pass", "✓ sha256 of bytes and scales match");
    say("fail", "✗ MISMATCH");
    place.after(
      notice("error", wrong.join("; "), "The file was damaged or edited after packing. It is shown, but not run."),
    );
    return undefined;
  } catch (error) {
    if (error instanceof Stopped) return undefined;
    return say("fail", `✗ ${error instanceof Error ? error.message : error}`);
  }
}

/** Return a weight, read once. @param {Container} from @param {import("./container.js").PackedEntry} of @param {Progress} progress */
async function weightOf(from, of, progress) {
  if (weight?.entry !== of) weight = await from.load(of, progress);
  return weight;
}

/** Run and verify what is chosen. @param {Container} from @param {import("./container.js").PackedEntry} of */
async function run(from, of) {
  const job = work;
  if (job.signal.aborted) return;
  const progress = new Progress(showProgress, job.signal);
  setRunning(true);
  byId("result", HTMLElement).replaceChildren();
  try {
    if (from.problems.length)
      throw new PageError("a reader refuses this file, so nothing of it is run", from.problems[0]);
    await progress.part("Opening the device");
    if (!gpu || gpu.isLost) gpu = await Gpu.open();
    const kernels = await chosenKernels();
    const { input, inputSays, seed } = await chosenInput(of);
    const verdict = await verify(gpu, of, (p) => weightOf(from, of, p), kernels, input, seed, progress);
    const said = {
      container: from,
      entry: of,
      input,
      inputSays,
      digestsChecked: CAN_DIGEST && of.said !== null,
      adapter: gpu.name,
    };
    byId("result", HTMLElement).replaceChildren(...verdictView(said, verdict));
    announce(verdict.isMatch ? `Verified: ${shown(of.name)}` : `Failed: ${shown(of.name)}`);
  } catch (error) {
    if (job === work) showRunProblem(error);
  } finally {
    if (job === work) setRunning(false);
  }
}

/** @returns {Promise<import("./kernel.js").Kernel[]>} */
async function chosenKernels() {
  const { value } = byId("kernel", HTMLSelectElement);
  if (value === "own" && ownKernel) return [ownKernel];
  return Promise.all((value === "" ? LINEAR_KERNELS : [value]).map(shippedKernel));
}

/** @param {import("./container.js").PackedEntry} of */
async function chosenInput(of) {
  const seed = Number(byId("seed", HTMLInputElement).value);
  if (!byId("x-from-file", HTMLInputElement).checked) {
    const rows = Number(byId("rows", HTMLInputElement).value);
    return { input: randomInput(rows, of.inFeatures, seed), inputSays: `random, seed ${seed}`, seed };
  }
  if (!xFile)
    throw new PageError("there is no file for x yet", "Choose one, drop it on the page, or take random rows.");
  return { input: await readInput(xFile, of), inputSays: shown(xFile.name), seed };
}

/** End what is going on, if anything is. */
function stop() {
  work.abort();
  work = new AbortController();
  setRunning(false);
}

/** @param {boolean} isRunning */
function setRunning(isRunning) {
  byId("progress", HTMLElement).hidden = !isRunning;
  byId("run", HTMLButtonElement).disabled = isRunning;
  byId("stop", HTMLButtonElement).hidden = !isRunning;
  byId("run-card", HTMLElement).setAttribute("aria-busy", String(isRunning));
}

/** @param {string} title @param {number} done @param {number} total */
function showProgress(title, done, total) {
  const bar = byId("progress-bar", HTMLProgressElement);
  byId("progress-text", HTMLElement).textContent = total
    ? `${title}: ${Math.floor((100 * done) / total)} %`
    : `${title} …`;
  if (total) bar.value = done / total;
  else bar.removeAttribute("value");
}

/** @param {File} file */
function takeInput(file) {
  if (!container) throw new PageError(`${shown(file.name)} is an input`, "Drop the packed file first, then its x.");
  xFile = file;
  byId("x-from-file", HTMLInputElement).checked = true;
  showXFile();
  announce(`${shown(file.name)} is taken as x`);
}

function showXFile() {
  const isFromFile = byId("x-from-file", HTMLInputElement).checked;
  byId("random-fields", HTMLElement).hidden = isFromFile;
  byId("x-fields", HTMLElement).hidden = !isFromFile;
  for (const id of ["rows", "seed"]) byId(id, HTMLInputElement).disabled = isFromFile;
  byId("x-name", HTMLElement).textContent = xFile ? shown(xFile.name) : "none yet; it can be dropped on the page, too";
}

/** @param {import("./kernel.js").Kernel} kernel */
function takeKernel(kernel) {
  ownKernel = kernel;
  fillKernels();
  byId("kernel", HTMLSelectElement).value = "own";
  announce(`${shown(kernel.name)} is taken as the kernel`);
}

function fillKernels() {
  const choices = [["", EVERY_KERNEL], ...LINEAR_KERNELS.map((name) => [name, name])];
  if (ownKernel) choices.push(["own", `${shown(ownKernel.name)} (yours)`]);
  byId("kernel", HTMLSelectElement).replaceChildren(
    ...choices.map(([value, text]) => element("option", { value }, text)),
  );
}

const [introduction] = byId("result", HTMLElement).children;
function placeholder() {
  return noGpu ? element("div", {}, notice("warning", noGpu.message, noGpu.hint), browserHelp()) : introduction;
}

/** @param {string} text */
function announce(text) {
  byId("announcement", HTMLElement).textContent = text;
}

/** Show what is wrong with a file. @param {unknown} error */
function showProblem(error) {
  byId("problem", HTMLElement).replaceChildren(noticeOf(error));
}

/** Show why a tensor could not be checked. @param {unknown} error */
function showRunProblem(error) {
  const result = byId("result", HTMLElement);
  if (error instanceof Stopped) {
    result.replaceChildren(element("p", { className: "note" }, "Stopped."));
    return;
  }
  const badge = element("strong", { className: "badge" }, "! Not checked");
  const verdict = element(
    "p",
    { className: "verdict", "data-verdict": "error" },
    badge,
    element("span", {}, `${shown(entry?.name ?? "")} could not be checked.`),
  );
  result.replaceChildren(verdict, noticeOf(error), ...(error instanceof NoGpuError ? [browserHelp()] : []));
  announce(`Could not be checked: ${error instanceof Error ? error.message : error}`);
}

/** @param {unknown} error */
function noticeOf(error) {
  if (error instanceof PageError) return notice("error", error.message, error.hint);
  console.error(error);
  const words = error instanceof Error ? `${error.name}: ${error.message}` : String(error);
  return notice("error", `a fault of this page: ${words}`, "Please report it, with the file if you may.");
}

/** @type {PageError | null} */
let noGpu = null;

/** Say which adapter there is, before anybody asks for it. */
async function showAdapter() {
  const chip = byId("adapter", HTMLElement);
  try {
    const adapter = await findAdapter();
    chip.dataset.state = isSoftware(adapter) ? "software" : "ready";
    chip.textContent = `${adapterName(adapter)}${isSoftware(adapter) ? ", on the CPU" : ""}`;
    chip.title = `The adapter that WebGPU offers here. Buffers up to ${count(adapter.limits.maxStorageBufferBindingSize)} bytes.`;
  } catch (error) {
    if (!(error instanceof PageError)) throw error;
    noGpu = error;
    chip.dataset.state = "none";
    chip.textContent = "no WebGPU here";
    byId("help-title", HTMLElement).textContent = "No WebGPU here: what to do";
    byId("help", HTMLElement).prepend(
      notice("warning", error.message, error.hint || "Files can be looked at all the same, but not run."),
    );
    byId("empty", HTMLElement).prepend(byId("help-card", HTMLElement));
  }
}

function listenToDrops() {
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
    void takeFiles([...(event.dataTransfer?.files ?? [])]);
  });
}

function listen() {
  for (const [id, take] of /** @type {[string, (files: File[]) => void][]} */ ([
    ["file", takeFiles],
    ["x-file", takeFiles],
  ])) {
    const input = byId(id, HTMLInputElement);
    input.addEventListener("change", () => {
      const files = [...(input.files ?? [])];
      input.value = ""; // so that the same file can be chosen again
      take(files);
    });
  }
  byId("sample", HTMLButtonElement).addEventListener("click", async () => {
    try {
      const response = await fetch(new URL("../sample.safetensors", import.meta.url));
      if (!response.ok) throw new PageError(`the sample cannot be fetched: ${response.status}`);
      await takeFiles([new File([await response.blob()], "sample.safetensors")]);
    } catch (error) {
      showProblem(error);
    }
  });
  byId("tensor-list", HTMLElement).addEventListener("change", (event) => {
    const chosen = event.target instanceof HTMLInputElement ? container?.entries.get(event.target.value) : undefined;
    if (chosen) void choose(chosen);
  });
  byId("filter", HTMLInputElement).addEventListener("input", (event) => {
    const filter = event.target instanceof HTMLInputElement ? event.target.value : "";
    if (container) fillTensorList(byId("tensor-list", HTMLElement), container, filter, entry?.name ?? null);
  });
  for (const radio of document.querySelectorAll("input[name=x]")) radio.addEventListener("change", showXFile);
  byId("run-form", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    if (!container || !entry) return;
    stop();
    const [from, of] = [container, entry];
    running = running.then(() => run(from, of));
  });
  byId("stop", HTMLButtonElement).addEventListener("click", () => {
    stop();
    showRunProblem(new Stopped());
    byId("run", HTMLButtonElement).focus();
  });
  addEventListener("unhandledrejection", (event) => showProblem(event.reason));
  addEventListener("error", (event) => showProblem(event.error));
}

fillKernels();
byId("help", HTMLElement).append(browserHelp());
listenToDrops();
listen();
await showAdapter();
