"""A headless Chromium with WebGPU on its own software driver, and a folder served to it."""

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, sync_playwright

INSTALL = ".ci/ensure-chromium installs one, or says how; CHROMIUM=/path/to/it names one"
# SwiftShader computes on the CPU and comes with Chromium; without the second Chromium hides WebGPU on it.
FLAGS = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")


def find_chromium() -> Path:
    """Return the program: $CHROMIUM, or the first of the usual names on the path."""
    names = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else ["chromium", "chromium-browser", "google-chrome"]
    for name in names:
        if found := shutil.which(name):
            return Path(found)
    raise FileNotFoundError(f"no Chromium: {', '.join(names)} is not there; {INSTALL}")


def swiftshader_icd() -> Path:
    """Return the manifest of SwiftShader, the Vulkan driver beside Chromium's binary, for VK_DRIVER_FILES."""
    program = find_chromium()
    folders = (program.resolve().parent, Path("/usr/lib/chromium"), Path("/usr/lib/chromium-browser"))
    for folder in folders:
        if (folder / "vk_swiftshader_icd.json").is_file():
            return folder / "vk_swiftshader_icd.json"
    raise FileNotFoundError(f"no vk_swiftshader_icd.json beside {program}; {INSTALL}")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Print nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder as `python -m http.server` does, on a free port of this machine; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def chromium(*, webgpu: bool = True) -> Iterator[Browser]:
    """Start Chromium; without `webgpu` its pages find no adapter. Whatever it does is over when this is left."""
    flags = ["--no-sandbox", *(FLAGS if webgpu else ())]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser,
    url: str,
    *,
    width: int = 1280,
    height: int = 800,
    scheme: Literal["light", "dark"] = "light",
    timeout_s: float = 60,
) -> Iterator[Page]:
    """Open an address in a fresh profile, with a window's size and a colour scheme.

    A Page evaluates JavaScript (`page.evaluate("(a) => …", a)` awaits promises and returns what JSON can hold), waits
    (`page.wait_for_selector`), drops files (`page.set_input_files`) and draws itself (`page.screenshot(path=…)`).
    """
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(timeout_s * 1000)
    try:
        page = context.new_page()
        page.goto(url)
        yield page
    finally:
        context.close()


def requests_of(page: Page) -> list[str]:
    """Return a list that fills with the address of every request that the page makes from now on."""
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    return seen


def adapter_info(page: Page) -> dict[str, Any] | None:
    """Return what WebGPU says of its adapter in this page, or None without one."""
    info: dict[str, Any] | None = page.evaluate(
        """async () => {
          const adapter = await navigator.gpu?.requestAdapter();
          if (!adapter) return null;
          const { vendor, architecture, device, description } = adapter.info;
          return { vendor, architecture, device, description, features: [...adapter.features] };
        }"""
    )
    return info
