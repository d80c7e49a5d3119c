"""Fixtures of the page's tests: one Chromium and one server for all, a fresh page for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import chromium, find_chromium, opened, served
from page_under_test import PAGE, PackedPage
from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where the checkout is served, as `python -m http.server` does it."""
    with served(ROOT) as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A Chromium with WebGPU; where there is none, that is a failure and no skip."""
    with chromium() as started:
        yield started


@pytest.fixture
def browser_without_webgpu(browser: Browser) -> Iterator[Browser]:
    """A Chromium that offers no adapter, beside the other one: Playwright runs once a process."""
    started = browser.browser_type.launch(executable_path=find_chromium(), args=["--no-sandbox"])
    yield started
    started.close()


@pytest.fixture(scope="module")
def shared_page(browser: Browser, address: str) -> Iterator[PackedPage]:
    """One page for many files, as a person uses it; SwiftShader takes seconds to compile a kernel for a new one."""
    with opened(browser, address + PAGE) as raw:
        yield PackedPage.ready(raw)


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[PackedPage]:
    """The page, just opened."""
    with opened(browser, address + PAGE) as raw:
        yield PackedPage.ready(raw)
