"""Plots of one tensor as SVG for a page: in the page's own text colour, with nothing to load."""

import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from qcs4w_gpu.picture import Picture

_INK = "#010203"  # becomes the page's text colour, light or dark
_BLUE, _RED = "#3b82f6", "#ef4444"


def svgs(picture: "Picture", key: str) -> list[tuple[str, str]]:
    """Return (title, SVG) of each plot.

    Args:
        picture: what to draw.
        key: tells the ids of this tensor's plots from those of others on the page.
    """
    excess = "error / bound" if picture.probe == "bounded" else "error"
    return [
        (f"{excess} of each element of y, {picture.probe} probe", _draw(_error_map, picture, f"{key}m", (6.4, 3.0))),
        ("error against bound", _draw(_error_against_bound, picture, f"{key}b", (3.6, 2.6))),
        ("errors", _draw(_error_histogram, picture, f"{key}e", (3.6, 2.6))),
        ("codes of the weight", _draw(_code_histogram, picture, f"{key}c", (3.6, 2.6))),
    ]


def _error_map(figure: "Figure", axes: "Axes", picture: "Picture") -> None:
    import numpy as np
    from matplotlib.colors import LogNorm

    rows, columns = picture.shape
    cells = picture.cells
    finite = cells[np.isfinite(cells) & (cells > 0)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (1e-3, 1.0)
    if picture.probe == "bounded":  # 1 is where wrong begins: keep it inside the scale
        low, high = min(low, 1e-3), max(high, 10.0)
    low = max(low, high * 1e-9)
    shown = np.clip(np.where(np.isfinite(cells), cells, high), low, high)
    image = axes.imshow(
        shown,
        norm=LogNorm(low, high if high > low else 10 * low),
        cmap="cividis",
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )
    axes.set_xlabel("column n")
    axes.set_ylabel("row m")
    axes.locator_params(integer=True, nbins=8)
    bar = figure.colorbar(image, ax=axes)
    bar.outline.set_edgecolor(_INK)
    if picture.probe == "bounded":
        bar.ax.axhline(1.0, color=_RED, linewidth=2)
        bar.set_label("error / bound; red: 1")


def _error_against_bound(_: "Figure", axes: "Axes", picture: "Picture") -> None:
    import numpy as np

    if picture.probe == "exact":
        axes.plot(np.sort(picture.errors), ".", color=_BLUE, markersize=3, rasterized=True)
        axes.set_xlabel("elements, sorted; the bound is 0")
        axes.set_ylabel("error")
        return
    seen = picture.errors > 0
    axes.loglog(picture.bounds[seen], picture.errors[seen], ".", color=_BLUE, markersize=3, rasterized=True)
    if len(picture.bounds):
        ends = np.array([picture.bounds.min(), picture.bounds.max()])
        axes.loglog(ends, ends, color=_RED, linewidth=1.2, label="error = bound")
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
        _label_ends(axes, *ends)
    axes.set_xlabel("bound")
    axes.set_ylabel("error")


def _label_ends(axes: "Axes", low: float, high: float) -> None:
    """Label the ends of a logarithmic axis alone where it is so short that all its ticks would be labelled."""
    if high < 10 * low:
        axes.set_xticks([low, high] if high > 1.05 * low else [low])
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:.2g}")


def _error_histogram(_: "Figure", axes: "Axes", picture: "Picture") -> None:
    import numpy as np

    edges = picture.error_edges
    axes.bar(edges[:-1], picture.error_counts, width=np.diff(edges), align="edge", color=_BLUE)
    axes.set_xlabel(f"log10(error); {picture.equal:,} elements without any")
    axes.set_ylabel("elements")


def _code_histogram(_: "Figure", axes: "Axes", picture: "Picture") -> None:
    codes = list(range(-8, 8))
    axes.bar(codes, picture.code_counts, color=_BLUE)
    axes.set_xticks(codes[::2])
    axes.set_xlabel("code")
    axes.set_ylabel("weights")


def _draw(plot: Any, picture: "Picture", key: str, inches: tuple[float, float]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), _INK),
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": key,
    }
    stream = io.StringIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        axes.set_facecolor("none")
        plot(figure, axes, picture)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, dpi=200, metadata=metadata)
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # Ids are global to a page, and matplotlib numbers those of each figure from 1.
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", text)
