/** The page: what is open, what was chosen, and what happens when. */

import { Container, NotPackedError } from "./container.js";
import { CAN_DIGEST, wrongDigests } from "./digest.js";
import { byId, element, notice } from "./dom.js";
import { PageError, Stopped } from "./errors.js";
import { listenToDrops } from "./drops.js";
import { Gpu, NoGpuError } from "./gpu.js";
import { holdsInput, isNpy } from "./input.js";
import { readKernel } from "./kernel.js";
import { Progress } from "./progress.js";
import { RunForm } from "./run_form.js";
import { plural, shown } from "./text.js";
import { verify } from "./verify.js";
import { browserHelp, showAdapter } from "./view_adapter.js";
import { DumpView } from "./view_dump.js";
import { entryFacts, fileFacts, fileProblems, fillTensorList } from "./view_file.js";
import { verdictView } from "./view_verdict.js";

// Digests of larger tensors are checked when they are run, not whenever they are looked at.
const DIGEST_AT_ONCE = 64 * 2 ** 20;
const FILTER_FROM = 9;

/** @type {Container | null} */
let container = null;
/** @type {import("./container.js").PackedEntry | null} */
let entry = null;
/** The weight that was read last. @type {import("./container.js").Weight | null} */
let weight = null;
/** @type {Gpu | null} */
let gpu = null;
/** Why there is no adapter. @type {NoGpuError | null} */
let noGpu = null;
/** Ends the run that is going on. */
let work = new AbortController();
/** Ends what is read of a tensor that nobody looks at any more. */
let look = new AbortController();
/** The last run: the next one begins when it has let go of the device. */
let running = Promise.resolve();

/** Which opening of a file is the newest. */
let opening = 0;

const dumpView = new DumpView();
const form = new RunForm();

/** Take files as they come: packed files are opened, .npy is x, .wgsl is a kernel. @param {Iterable<File>} files */
async function takeFiles(files) {
  for (const file of files) {
    try {
      byId("problem", HTMLElement).replaceChildren();
      if (file.name.toLowerCase().endsWith(".wgsl")) await takeKernel(file);
      else if (isNpy(file)) takeInput(file);
      else await open(file);
    } catch (error) {
      if (error instanceof NotPackedError && entry && (await holdsInput(file, entry))) takeInput(file);
      else showProblem(error);
    }
  }
}

/** @param {File} file */
async function takeKernel(file) {
  const kernel = await readKernel(file);
  form.takeKernel(kernel);
  announce(`${shown(kernel.name)} is taken as the kernel`);
}

/** @param {File} file */
function takeInput(file) {
  if (!container) throw new PageError(`${shown(file.name)} is an input`, "Drop the packed file first, then its x.");
  form.takeInput(file);
  announce(`${shown(file.name)} is taken as x`);
}

/** @param {File} file */
async function open(file) {
  stop();
  const turn = ++opening;
  let opened;
  try {
    opened = await Container.open(file);
  } catch (error) {
    if (!(error instanceof NotPackedError && container)) close();
    throw error;
  }
  if (turn !== opening) return; // another file was dropped since
  container = opened;
  weight = null;
  form.forgetInput();
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
  container = entry = weight = null;
  byId("work", HTMLElement).hidden = true;
  byId("empty", HTMLElement).hidden = false;
  byId("drop-title", HTMLElement).textContent = "Drop a packed .safetensors file here";
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

/**
 * Run and verify what was chosen.
 * @param {Container} from
 * @param {import("./container.js").PackedEntry} of
 * @param {AbortController} job ends it
 */
async function run(from, of, job) {
  if (job.signal.aborted) return;
  const progress = new Progress(form.showProgress, job.signal);
  form.setRunning(true);
  byId("result", HTMLElement).replaceChildren();
  try {
    if (from.problems.length) {
      throw new PageError("a reader refuses this file, so nothing of it is run", from.problems[0]);
    }
    await progress.part("Opening the device");
    if (!gpu || gpu.isLost) gpu = await Gpu.open();
    const kernels = await form.kernels();
    const { input, inputSays, seed } = await form.input(of);
    const verdict = await verify(gpu, of, (p) => weightOf(from, of, p), kernels, input, seed, progress);
    progress.check(); // stopped in the last moment
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
    if (job === work) form.setRunning(false);
  }
}

/** End what is going on, if anything is. */
function stop() {
  work.abort();
  work = new AbortController();
  form.setRunning(false);
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

function listen() {
  for (const input of ["file", "x-file"].map((id) => byId(id, HTMLInputElement))) {
    input.addEventListener("change", () => {
      const files = [...(input.files ?? [])];
      input.value = ""; // so that the same file can be chosen again
      void takeFiles(files);
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
  byId("run-form", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    if (!container || !entry) return;
    stop();
    const [from, of, job] = [container, entry, work];
    running = running.then(() => run(from, of, job));
  });
  byId("stop", HTMLButtonElement).addEventListener("click", () => {
    stop();
    showRunProblem(new Stopped());
    byId("run", HTMLButtonElement).focus();
  });
  addEventListener("unhandledrejection", (event) => showProblem(event.reason));
  addEventListener("error", (event) => showProblem(event.error));
}

byId("help", HTMLElement).append(browserHelp());
listenToDrops(takeFiles);
listen();
noGpu = await showAdapter();
