"""The page that verify --html writes, in a real browser."""

import pytest
from chromium import opened, requests_of
from playwright.sync_api import Browser, Page
from reporting import EVIL, make_batch

from qcs4w_cli.main import run
from qcs4w_gpu import Gpu

WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def report(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report on a batch with every kind of result."""
    folder = tmp_path_factory.mktemp("report")
    assert run([*map(str, make_batch(folder)), "--html", str(folder / "r.html")]) == 2
    return (folder / "r.html").as_uri()


def column(page: Page, index: int) -> list[str]:
    """The texts of one column, as shown."""
    texts: list[str] = page.evaluate(
        "(index) => [...document.querySelectorAll('tbody tr')].map(row => row.cells[index].innerText)", index
    )
    return texts


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(browser: Browser, report: str, width: int, scheme: str) -> None:
    """At both widths the page itself does not scroll sideways, its text stands out, and its plots are seen."""
    with opened(browser, report, width=width, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width == WIDTHS[0]:  # there the table shows all its columns, the finding too
            assert page.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.scroll'))")
        ink, paper = page.evaluate(
            """() => ["color", "backgroundColor"].map(key =>
              getComputedStyle(document.body)[key].match(/\\d+/g).map(Number).reduce((a, b) => a + b))"""
        )
        assert (ink < 150 and paper > 700) if scheme == "light" else (ink > 600 and paper < 120)
        # Labels of the plots take the text's colour, whatever the scheme.
        colours = page.evaluate(
            """() => [...document.querySelectorAll("svg text")].map(text => getComputedStyle(text).fill)"""
        )
        assert set(colours) == {page.evaluate("getComputedStyle(document.body).color")}
        boxes = [figure.bounding_box() for figure in page.query_selector_all("figure svg")]
        assert len(boxes) == 4
        assert all(box and box["width"] > 200 and box["height"] > 100 for box in boxes)


def test_the_table_sorts(browser: Browser, report: str) -> None:
    """A click on a title sorts by it, numbers as numbers and what has none last; a second click turns it round."""
    with opened(browser, report) as page:
        assert column(page, 0) == ["pass", "fail", "pass", "error"]
        page.click("th button:has-text('status')")
        assert column(page, 0) == ["error", "fail", "pass", "pass"]
        page.click("th button:has-text('quantization error')")
        up = column(page, 8)
        page.click("th button:has-text('quantization error')")
        down = column(page, 8)
        assert [*map(float, up[:3])] == sorted(map(float, up[:3]))
        assert down[:3] == up[2::-1]
        assert up[3] == down[3] == ""
        assert page.get_attribute("th:has-text('quantization error')", "aria-sort") == "descending"


def test_it_asks_for_nothing_and_runs_nothing_of_a_name(browser: Browser, report: str) -> None:
    """The page loads nothing but itself, and a name that looks like a script is shown as text."""
    with opened(browser, "about:blank") as page:
        seen = requests_of(page)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto(report)
        assert [address for address in seen if not address.startswith("data:")] == [report]
        assert problems == []
        assert EVIL in column(page, 1)


def test_a_link_leads_to_what_is_wrong(browser: Browser, report: str) -> None:
    """The name of a failing tensor leads to its plots and its suspected cause."""
    with opened(browser, report) as page:
        page.click("td a:has-text('b.weight')")
        target = page.evaluate("document.querySelector(location.hash).innerText")
        assert "likely cause: nibbles swapped" in target
