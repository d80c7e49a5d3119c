"""Drives the page as a person does, and reads what it shows."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from playwright.sync_api import Page

PAGE = "/examples/browser/"


@dataclass(frozen=True)
class PackedPage:
    """The page in a browser.

    Attributes:
        raw: Playwright's page.
        faults: what the page itself got wrong; must stay empty.
    """

    raw: Page
    faults: list[str]

    @classmethod
    def ready(cls, raw: Page) -> "PackedPage":
        """Wait until the page has looked for an adapter."""
        faults: list[str] = []
        raw.on("pageerror", lambda error: faults.append(str(error)))
        raw.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))
        raw.wait_for_selector("#adapter:not([data-state=wait])")
        return cls(raw, faults)

    def take(self, *files: Path) -> None:
        """Choose files, as dropping them does."""
        self.raw.evaluate("document.getElementById('announcement').textContent = ''")
        self.raw.set_input_files("#file", [str(file) for file in files])

    def open(self, packed: Path, tensor: str | None = None) -> None:
        """Open a packed file, and choose one of its tensors."""
        self.take(packed)
        self.raw.wait_for_selector("#announcement:text('is open')", state="attached")
        if tensor is not None:
            self.raw.check(f"input[name=tensor][value='{tensor}']")
        self.raw.wait_for_selector("#digest:not([data-state=wait])")

    def problem(self) -> str:
        """Wait for the message about a file, and return it."""
        self.raw.wait_for_selector("#problem .notice")
        return self.raw.inner_text("#problem")

    def take_x(self, path: Path) -> None:
        """Give the page a file for x."""
        self.take(path)
        self.raw.wait_for_selector(f"#x-name:text('{path.name}')")

    def run(self, kernel: str = "") -> str:
        """Run and verify; return the verdict: pass, fail or error."""
        self.raw.select_option("#kernel", kernel)
        return self.press_run()

    def press_run(self) -> str:
        """Run and verify with what is chosen; return the verdict: pass, fail or error."""
        self.raw.click("#run")
        return self.verdict()

    def verdict(self) -> str:
        """Wait for a verdict."""
        verdict = self.raw.wait_for_selector("#result .verdict")
        assert verdict is not None
        self.raw.wait_for_selector("#run:enabled")
        assert not self.faults
        return str(verdict.get_attribute("data-verdict"))

    def result(self) -> str:
        """What the page says of the run."""
        return self.raw.inner_text("#result")

    def download(self, name: str) -> NDArray[np.float32]:
        """Download an array: "x" or "y"."""
        with self.raw.expect_download() as waiting:
            self.raw.click(f"text=Download {name}.npy")
        path = waiting.value.path()
        array: NDArray[np.float32] = np.load(io.BytesIO(Path(path).read_bytes()))
        return array

    def first_numbers(self) -> dict[tuple[int, int], tuple[float, float, float, float]]:
        """Return (y, float64, error, bound) by place, of the elements that the page shows."""
        lines: list[list[str]] = self.raw.eval_on_selector_all(
            ".numbers tbody tr", "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
        )
        found = {}
        for place, *numbers in lines:
            row, column = (int(part) for part in place.partition("]")[0].removeprefix("y[").split(","))
            y, expected, error, bound = map(float, numbers)
            found[row, column] = (y, expected, error, bound)
        return found

    def dump(self) -> list[dict[str, Any]]:
        """Return the rows of the dump as they are shown: titles with the texts of their cells, in column order."""
        rows: list[dict[str, Any]] = self.raw.eval_on_selector_all(
            ".dump-row",
            """rows => rows.map(row => {
              const lines = {};
              for (const line of row.querySelectorAll("tr")) {
                const [title, ...cells] = [...line.children].map(cell => cell.textContent);
                (lines[title] ??= []).push(...cells);
              }
              return { title: row.querySelector("h3").textContent, lines };
            })""",
        )
        return rows

    def module(self, name: str, expression: str, argument: Any = None) -> Any:
        """Evaluate a function of (module, argument) with one of the page's own modules."""
        return self.raw.evaluate(
            f"async (argument) => ({expression})(await import('{PAGE}js/{name}.js'), argument)", argument
        )
