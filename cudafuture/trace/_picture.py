"""Pictures of a trace: a timeline of all ranks, and where the time of each step went."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from cudafuture.trace._analysis import KINDS, TraceAnalysis, analyse, cause_of, kind_of, outer_waits, steps_of
from cudafuture.trace._model import RankTrace, Trace, load

__all__ = ["plot"]

_COLOURS = {
    "computing": "#b8c4d0",
    "communication": "#d1495b",
    "io": "#2e86ab",
    "data": "#edae49",
    "pipeline": "#8d6cab",
    "device": "#66a182",
    "other": "#6b6b6b",
}
_LABELS = {
    "computing": "computing",
    "communication": "exposed communication",
    "io": "exposed I/O",
    "data": "waiting for data",
    "pipeline": "bubble",
    "device": "waiting for the device",
    "other": "other waits",
}
_MOST_BARS = 40
_MOST_SLICES = 20_000  # of a track: more are narrower than a pixel


def plot(path: str | os.PathLike[str] | Trace, output: str | os.PathLike[str]) -> None:
    """Draw a trace: a timeline of all ranks, and one stacked bar for each step.

    In the timeline each rank has a row for the thread of its steps, grey where it computes and coloured where it waits,
    and a thinner one for the operations of each kind that are in flight.

    Args:
        path: a file or a folder that `record` has written.
        output: a ``.png``, ``.svg`` or ``.html`` file to write; the last one needs no other file.

    Raises:
        ImportError: matplotlib is missing: ``pip install cudafuture[pictures]``.
        ValueError: `output` has another ending; or as `load` raises it.

    >>> import tempfile
    >>> from cudafuture import trace
    >>> folder = tempfile.mkdtemp()
    >>> with trace.record(folder), trace.step(0):
    ...     pass
    >>> trace.plot(folder, folder + "/step.svg")
    """
    ending = Path(output).suffix
    if ending not in (".png", ".svg", ".html"):
        raise ValueError(f"{os.fspath(output)!r}: the picture is a .png, an .svg or an .html")
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("plot() needs matplotlib: pip install 'cudafuture[pictures]'") from e
    trace = load(path)
    found = analyse(trace)
    rows = sum(1 + len(_flight_kinds(rank)) for rank in trace.ranks)
    figure = Figure(figsize=(12, 2.2 + 0.45 * rows + 3), layout="constrained")
    timeline, bars = figure.subplots(2, 1, height_ratios=(max(2.0, 0.45 * rows), 3))
    _draw_timeline(timeline, trace)
    _draw_bars(bars, found)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    if ending != ".html":
        figure.savefig(output, dpi=120)
        return
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    Path(output).write_text(_page(buffer.getvalue(), found), encoding="utf-8")


def _flight_kinds(rank: RankTrace) -> list[str]:
    kinds = {kind_of(one) for one in rank.operations()}
    return [kind for kind in KINDS if kind in kinds]


def _draw_timeline(axes: Any, trace: Trace) -> None:
    origin = trace.begin
    names: list[str] = []
    for rank in trace.ranks:
        row = len(names)
        names.append(rank.title)
        spans = [((step.begin - origin) / 1e6, (step.end - step.begin) / 1e6) for step in steps_of(rank, trace)]
        edges = {"edgecolors": "white", "linewidth": 0.8}  # between steps that touch
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=_COLOURS["computing"], **edges)
        threads = {step.thread for step in steps_of(rank, trace)}
        waits = [one for one in outer_waits(rank) if one.thread in threads]
        longest = sorted(waits, key=lambda one: one.begin - one.end)[:_MOST_SLICES]
        for kind in KINDS:
            bars = [((w.begin - origin) / 1e6, (w.end - w.begin) / 1e6) for w in longest if cause_of(w)[1] == kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[kind])
        for kind in _flight_kinds(rank):
            row = len(names)
            names.append(f"{kind} in flight")
            bars = [
                ((one.issued - origin) / 1e6, ((rank.end if one.end is None else one.end) - one.issued) / 1e6)
                for one in rank.operations()
                if one.issued is not None and kind_of(one) == kind
            ]
            axes.broken_barh(bars[:_MOST_SLICES], (row - 0.2, 0.4), facecolors=_COLOURS[kind], alpha=0.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("virtual ms" if trace.is_virtual else "ms")
    axes.set_title("waits of each rank, and what is in flight", loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_bars(axes: Any, found: TraceAnalysis) -> None:
    steps = found.steps[:_MOST_BARS]
    below = [0.0] * len(steps)
    for kind in ("computing", *KINDS):
        heights = [(step.computing if kind == "computing" else step.waits[kind]) * 1e3 for step in steps]
        if not any(heights) and kind != "computing":
            continue
        axes.bar(range(len(steps)), heights, 0.8, below, color=_COLOURS[kind], label=_LABELS[kind])
        below = [lower + height for lower, height in zip(below, heights, strict=True)]
    ranks = len({step.rank for step in found.steps})
    names = [f"{step.rank}\n{step.name}" if ranks > 1 else step.name for step in steps]
    axes.set_xticks(range(len(steps)), names, rotation=90 if len(steps) > 12 else 0, fontsize=8)
    axes.set_ylabel("ms")
    more = f", the first {_MOST_BARS} of {len(found.steps)}" if len(found.steps) > len(steps) else ""
    axes.set_title(f"parts of each step{more}", loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _page(picture: str, found: TraceAnalysis) -> str:
    """Return a page that stands alone: the picture, and the text of the analysis."""
    text = str(found).replace("&", "&amp;").replace("<", "&lt;")
    svg = picture[picture.index("<svg") :]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Where the time went</title>\n'
        "<style>body{font:15px/1.5 sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
        "svg{width:100%;height:auto}pre{background:#f4f5f7;padding:1em;overflow-x:auto}</style></head>\n"
        f"<body><h1>Where the time went</h1>\n{svg}\n<pre>{text}</pre></body></html>\n"
    )
