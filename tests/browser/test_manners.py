"""How the page behaves: nothing leaves the machine, the keyboard is enough, it fits any width, faults are explained."""

import base64
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from chromium import opened, requests_of, served
from page_under_test import PAGE, PackedPage
from playwright.sync_api import Browser, Error, Request
from safetensors import safe_open

from qcs4w_packer import pack_weight, save_container

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "browser" / "sample.safetensors"


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """A weight that keeps a software driver busy for a while."""
    path = tmp_path / "large.safetensors"
    draw = np.random.default_rng(0)
    save_container(path, {"fc.weight": pack_weight(draw.standard_normal((4096, 4096), np.float32))})
    return path


def test_a_newcomer_sees_the_sample_verified(page: PackedPage) -> None:
    """Two clicks on a fresh page: the sample is open, run and verified, with adapter, clock and command line."""
    start = time.monotonic()
    page.raw.click("#sample")
    page.raw.wait_for_selector("#digest[data-state=pass]")
    assert page.press_run() == "pass"
    assert time.monotonic() - start < 120
    text = page.raw.text_content("#result") or ""
    assert "✓ Verified" in text
    assert "swiftshader" in text
    assert "GPU clock" in text or "wall clock" in text
    assert "qcs4w verify sample.safetensors --tensor block.down_proj.weight" in text


def test_the_sample_is_what_its_script_makes(tmp_path: Path) -> None:
    """sample.safetensors is small, and its tensors are those that make_sample.py packs today."""
    made = tmp_path / "made.safetensors"
    subprocess.run([sys.executable, ROOT / "examples" / "browser" / "make_sample.py", made], check=True)
    assert SAMPLE.stat().st_size < 50_000
    with safe_open(SAMPLE, "numpy") as ours, safe_open(made, "numpy") as fresh:
        assert set(ours.keys()) == set(fresh.keys())
        for name in ours.keys():  # noqa: SIM118 - safetensors has no other way
            np.testing.assert_array_equal(ours.get_tensor(name), fresh.get_tensor(name))


def test_nothing_leaves_the_machine(browser: Browser, address: str) -> None:
    """All that a whole session asks for are files of its own server, and what others serve it cannot reach."""
    with opened(browser, "about:blank") as raw:
        urls = requests_of(raw)
        sent: list[Request] = []
        raw.on("request", lambda request: sent.append(request))
        raw.goto(address + PAGE)
        page = PackedPage.ready(raw)
        page.open(SAMPLE)
        assert page.press_run() == "pass"
        page.download("y")
        own = [url for url in urls if not url.startswith("blob:")]
        assert own
        assert all(url.startswith(address) for url in own), own
        assert {request.method for request in sent} == {"GET"}
        assert not any(request.post_data for request in sent)
        with served(ROOT) as elsewhere, pytest.raises(Error, match="Failed to fetch"):
            raw.evaluate("async (url) => { await fetch(url, { mode: 'no-cors' }); }", f"{elsewhere}/README.md")
        with pytest.raises(Error, match="TrustedHTML"):
            raw.evaluate("() => { document.body.innerHTML = '<b>x</b>'; }")


def test_files_are_dropped(page: PackedPage) -> None:
    """A file dropped anywhere is opened; while it is over the page that shows."""
    raw = page.raw
    transfer = raw.evaluate_handle(
        """(text) => {
          const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes], "dropped.safetensors"));
          return transfer;
        }""",
        base64.b64encode(SAMPLE.read_bytes()).decode(),
    )
    raw.dispatch_event("footer", "dragenter", {"dataTransfer": transfer})
    assert raw.get_attribute("body", "data-drag") == "over"
    raw.dispatch_event("footer", "dragleave", {"dataTransfer": transfer})
    assert raw.get_attribute("body", "data-drag") is None
    raw.dispatch_event("footer", "dragenter", {"dataTransfer": transfer})
    raw.dispatch_event("footer", "drop", {"dataTransfer": transfer})
    raw.wait_for_selector("#announcement:text('dropped.safetensors is open')", state="attached")
    assert raw.get_attribute("body", "data-drag") is None
    assert raw.inner_text("#file-title") == "dropped.safetensors"


def test_the_keyboard_is_enough(page: PackedPage) -> None:
    """Choose a file, choose a tensor and run it by keys alone, always seeing where one is."""
    raw = page.raw

    def tab_to(selector: str) -> None:
        for _ in range(40):
            raw.keyboard.press("Tab")
            if raw.evaluate("selector => document.activeElement.matches(selector)", selector):
                break
        else:
            pytest.fail(f"Tab does not reach {selector}")
        shows = """(element) => [element, element.labels?.[0]].some((each) => {
          const { outlineStyle, outlineWidth } = each ? getComputedStyle(each) : { outlineStyle: "none" };
          return outlineStyle !== "none" && outlineWidth !== "0px";
        })"""
        closest = ":focus, .tensor:focus-within"
        assert any(raw.eval_on_selector_all(closest, f"all => all.map({shows})")), f"{selector}: the focus is not seen"

    # Listening from the start: a chooser that opens before Playwright hears of it is lost.
    raw.on("filechooser", lambda chooser: chooser.set_files(str(SAMPLE)))
    tab_to("#file")
    raw.keyboard.press("Enter")
    raw.wait_for_selector("#digest[data-state=pass]")
    tab_to("input[name=tensor]")
    for _ in range(3):
        raw.keyboard.press("ArrowDown")
    raw.wait_for_selector("#entry:has-text('1 outputs × 1 inputs')")
    assert raw.evaluate("document.activeElement.value") == "smallest.weight"
    tab_to("#run")
    raw.keyboard.press("Enter")
    assert page.verdict() == "pass"
    assert "Verified: smallest.weight" in (raw.text_content("#announcement") or "")
    tab_to("#columns-on, #layout")


def test_results_are_announced(page: PackedPage) -> None:
    """What happens is said in live regions, for those who do not see it."""
    assert page.raw.get_attribute("#announcement", "role") == "status"
    assert page.raw.get_attribute("#problem", "role") == "alert"
    page.open(SAMPLE)
    assert page.raw.text_content("#announcement") == "sample.safetensors is open: 4 packed tensors"


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_any_width(browser: Browser, address: str, width: int, scheme: str) -> None:
    """Nothing sticks out sideways: empty, with a message, open and with a verdict."""
    with opened(browser, address + PAGE, width=width, scheme=scheme) as raw:  # type: ignore[arg-type]
        page = PackedPage.ready(raw)

        def fits() -> bool:
            return bool(raw.evaluate("document.documentElement.scrollWidth <= innerWidth"))

        assert fits()
        page.take(ROOT / "README.md")
        page.problem()
        assert fits()
        page.open(SAMPLE, "long_row.weight")
        assert fits()
        assert page.run("linear_naive") == "pass"
        for summary in raw.locator("#result details:not([open]) summary").all():
            summary.click()
        assert fits()


PAIRS = (
    ("text", "card"), ("text", "page"), ("soft", "card"), ("soft", "page"), ("good", "good-wash"), ("good", "card"),
    ("bad", "bad-wash"), ("bad", "card"), ("odd", "odd-wash"), ("high", "high-wash"), ("low", "low-wash"),
    ("on-accent", "accent"), ("text", "bad-wash"), ("text", "low-wash"), ("soft", "low-wash"),
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser: Browser, address: str, scheme: str) -> None:
    """Each colour of text on its ground has a contrast of at least 4.5 (WCAG AA), in light and dark."""
    with opened(browser, address + PAGE, scheme=scheme) as raw:  # type: ignore[arg-type]
        for text, ground in PAIRS:
            colours = [
                raw.evaluate("name => getComputedStyle(document.documentElement).getPropertyValue(name)", f"--{name}")
                for name in (text, ground)
            ]
            lights = sorted(map(luminance, colours))
            assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, (text, ground, colours)


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb. Source: WCAG 2.2."""
    parts = [int(part, 16) / 255 for part in re.findall("..", colour.strip().removeprefix("#"))]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_without_an_adapter_files_can_still_be_looked_at(browser_without_webgpu: Browser, address: str) -> None:
    """The page says so at once and what to do, shows the nibbles, and running explains why not."""
    with opened(browser_without_webgpu, address + PAGE) as raw:
        page = PackedPage.ready(raw)
        assert raw.inner_text("#adapter") == "no WebGPU here"
        help_text = raw.inner_text("#help-card")
        for browser_name in ("Chrome", "Firefox", "Safari", "Linux", "--enable-unsafe-webgpu"):
            assert browser_name in help_text
        page.open(SAMPLE)
        assert raw.is_visible(".dump-row")
        assert page.press_run() == "error"
        assert "no adapter" in page.result()
        assert "Firefox" in page.result()


def test_on_an_address_that_is_not_secure_it_says_why(browser: Browser) -> None:
    """Served to another machine by http, browsers offer neither WebGPU nor sha256: both are said, the rest works."""
    with opened(browser, "about:blank") as raw:
        origin = "http://somewhere.example"
        raw.route(
            f"{origin}/**",
            lambda route: route.fulfill(path=ROOT / route.request.url.removeprefix(origin + "/").rstrip("/")),
        )
        raw.goto(f"{origin}{PAGE}index.html")
        page = PackedPage.ready(raw)
        assert "is not a secure address" in raw.inner_text("#help-card")
        page.open(SAMPLE)
        assert "not checked: browsers offer sha256 on https and localhost only" in raw.inner_text("#digest")
        assert raw.is_visible(".dump-row")
        assert page.press_run() == "error"
        assert "http://localhost" in page.result()


def test_kernels_that_are_not_served_are_explained(browser: Browser) -> None:
    """Served from its own folder the page has no kernels, and says which folder to serve."""
    with served(ROOT / "examples" / "browser") as url, opened(browser, url + "/") as raw:
        page = PackedPage.ready(raw)
        page.open(SAMPLE)
        assert page.press_run() == "error"
        assert "Serve the folder of the whole checkout: python -m http.server" in page.result()


def test_a_lost_device_is_told_and_replaced(browser: Browser, address: str, large_file: Path) -> None:
    """A device lost in the middle is named as that; the next run opens another one and verifies."""
    with opened(browser, "about:blank") as raw:
        raw.add_init_script(
            """globalThis.devices = [];
            const original = GPUAdapter.prototype.requestDevice;
            GPUAdapter.prototype.requestDevice = async function (...given) {
              const device = await original.apply(this, given);
              devices.push(device);
              return device;
            };"""
        )
        raw.goto(address + PAGE)
        page = PackedPage.ready(raw)
        page.open(large_file)
        raw.select_option("#kernel", "linear_naive")
        raw.click("#run")
        raw.wait_for_selector("#progress-text:text('product')")
        raw.evaluate("devices[0].destroy()")
        assert page.verdict() == "error"
        assert "the device was lost" in page.result()
        page.open(SAMPLE)
        assert page.run("linear_naive") == "pass"
        assert raw.evaluate("devices.length") == 2


def test_long_work_shows_how_far_it_is_and_can_be_stopped(page: PackedPage, large_file: Path) -> None:
    """Progress moves, Stop ends it, and the page goes on working."""
    page.open(large_file)
    page.raw.fill("#rows", "64")
    page.raw.click("#run")
    page.raw.wait_for_selector("#progress-text:text-matches('product: [1-9][0-9]? %')")
    assert page.raw.is_disabled("#run")
    page.raw.click("#stop")
    page.raw.wait_for_selector("#result:has-text('Stopped.')")
    assert page.raw.evaluate("document.activeElement.id") == "run"
    page.open(SAMPLE)
    assert page.run("linear_naive") == "pass"
    assert not page.faults


def test_another_tensor_ends_the_run_of_the_last(page: PackedPage, large_file: Path) -> None:
    """A result never appears beside a tensor that it is not of."""
    page.open(large_file)
    page.raw.fill("#rows", "64")
    page.raw.click("#run")
    page.raw.wait_for_selector("#progress-text:text('product')")
    page.open(SAMPLE, "smallest.weight")
    page.raw.fill("#rows", "4")
    assert page.run("linear_naive") == "pass"
    assert "smallest.weight" in page.result()
    assert "fc.weight" not in page.result()
