"""Pictures of a trace: a timeline of all ranks, and where the time of each step went."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from cudafuture.trace._analysis import KINDS, TraceAnalysis, analyse, kind_of, outer_waits, parts_of, steps_of
from cudafuture.trace._model import DeviceWork, RankTrace, Trace, load, stream_names

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
_LEAST_BUSY = 1 / 200  # of the time of a trace: a stream with less work has no row
_MOST_SLICES = 20_000  # of a track: more are narrower than a pixel


_Source: TypeAlias = str | os.PathLike[str] | Trace


def plot(path: _Source | Mapping[str, _Source], output: str | os.PathLike[str]) -> None:
    """Draw a trace: a timeline of all ranks, and one stacked bar for each step.

    In the timeline each rank has a row for the thread of its steps, grey where it computes and coloured where it waits,
    and thinner ones for the operations of each kind that are in flight, and for the work on each stream of a device.

    Args:
        path: a file or a folder that `record` has written; or several, such as of one program before and after a
            change, by their titles: each has a timeline, and all have one scale of time.
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
    >>> trace.plot({"before": folder, "after": folder}, folder + "/both.html")
    """
    ending = Path(output).suffix
    if ending not in (".png", ".svg", ".html"):
        raise ValueError(f"{os.fspath(output)!r}: the picture is a .png, an .svg or an .html")
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("plot() needs matplotlib: pip install 'cudafuture[pictures]'") from e
    traces = {title: load(one) for title, one in (path.items() if isinstance(path, Mapping) else [("", path)])}
    if not traces:
        raise ValueError("there is no trace to draw")
    found = {title: analyse(trace) for title, trace in traces.items()}
    heights = [max(1.2, 0.4 * sum(map(_rows_of, trace.ranks))) for trace in traces.values()]
    figure = Figure(figsize=(12, sum(heights) + 0.5 * len(traces) + 4), layout="constrained")
    *timelines, bars = figure.subplots(len(traces) + 1, 1, height_ratios=(*heights, 3))
    longest = max(trace.end - trace.begin for trace in traces.values()) / 1e6
    for (title, trace), timeline in zip(traces.items(), timelines, strict=True):
        _draw_timeline(timeline, trace, title)
        timeline.set_xlim(-0.01 * longest, 1.01 * longest or 1)
    timelines[-1].set_xlabel("virtual ms" if all(trace.is_virtual for trace in traces.values()) else "ms")
    _draw_bars(bars, found)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    if ending != ".html":
        figure.savefig(output, dpi=120)
        return
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    Path(output).write_text(_page(buffer.getvalue(), found), encoding="utf-8")


def _rows_of(rank: RankTrace) -> int:
    return 1 + len(_flight_kinds(rank)) + len(_streams(rank))


def _streams(rank: RankTrace) -> dict[str, list[DeviceWork]]:
    """Return the work of each stream that has a row, by its name."""
    names = stream_names(rank)
    found: dict[str, list[DeviceWork]] = {name: [] for name in names.values()}
    for work in rank.device_work:
        if work.end > work.begin:
            found[names[work.device, work.stream]].append(work)
    least = _LEAST_BUSY * (rank.end - rank.begin)
    return {name: work for name, work in found.items() if sum(one.end - one.begin for one in work) > least}


def _flight_kinds(rank: RankTrace) -> list[str]:
    kinds = {kind_of(one) for one in rank.operations()}
    return [kind for kind in KINDS if kind in kinds]


def _draw_timeline(axes: Any, trace: Trace, title: str) -> None:
    origin = trace.begin
    names: list[str] = []
    for rank in trace.ranks:
        row = len(names)
        names.append(rank.title if len(trace.ranks) > 1 else "thread of the steps")
        spans = [((step.begin - origin) / 1e6, (step.end - step.begin) / 1e6) for step in steps_of(rank, trace)]
        edges = {"edgecolors": "white", "linewidth": 0.8}  # between steps that touch
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=_COLOURS["computing"], **edges)
        threads = {step.thread for step in steps_of(rank, trace)}
        waits = [one for one in outer_waits(rank) if one.thread in threads]
        longest = sorted(waits, key=lambda one: one.begin - one.end)[:_MOST_SLICES]
        parts = [part for wait in longest for part in parts_of(wait)]
        for kind in KINDS:
            bars = [((p.begin - origin) / 1e6, (p.end - p.begin) / 1e6) for p in parts if p.kind == kind]
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
        for name, work in _streams(rank).items():
            row = len(names)
            names.append(name)
            bars = [((one.begin - origin) / 1e6, (one.end - one.begin) / 1e6) for one in work[:_MOST_SLICES]]
            colours = [_COLOURS[kind_of(one.future) if one.future.is_operation else "device"] for one in work]
            axes.broken_barh(bars, (row - 0.3, 0.6), facecolors=colours[:_MOST_SLICES], **edges)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(title or "waits of each rank, and what is in flight", loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_bars(axes: Any, found: Mapping[str, TraceAnalysis]) -> None:
    most = max(1, _MOST_BARS // len(found))  # of each trace
    shown = [(title, step) for title, analysis in found.items() for step in analysis.steps[:most]]
    titles, steps = [title for title, _ in shown], [step for _, step in shown]
    below = [0.0] * len(steps)
    for kind in ("computing", *KINDS):
        heights = [(step.computing if kind == "computing" else step.waits[kind]) * 1e3 for step in steps]
        if not any(heights) and kind != "computing":
            continue
        axes.bar(range(len(steps)), heights, 0.8, below, color=_COLOURS[kind], label=_LABELS[kind])
        below = [lower + height for lower, height in zip(below, heights, strict=True)]
    has_ranks = any(len({step.rank for step in analysis.steps}) > 1 for analysis in found.values())
    names = [
        "\n".join(filter(None, (title, step.rank if has_ranks else "", step.name)))
        for title, step in zip(titles, steps, strict=True)
    ]
    axes.set_xticks(range(len(steps)), names, rotation=90 if len(steps) > 12 else 0, fontsize=8)
    axes.set_ylabel("ms")
    number = max(len(analysis.steps) for analysis in found.values())
    more = f", the first {most} of {number}" if number > most else ""
    axes.set_title(f"parts of each step{more}", loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _page(picture: str, found: Mapping[str, TraceAnalysis]) -> str:
    """Return a page that stands alone: the picture, and the text of the analysis."""
    text = html.escape("\n\n".join(f"{title}: {one}" if title else str(one) for title, one in found.items()))
    svg = picture[picture.index("<svg") :]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Where the time went</title>\n'
        "<style>body{font:15px/1.5 sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
        "svg{width:100%;height:auto}pre{background:#f4f5f7;padding:1em;overflow-x:auto}</style></head>\n"
        f"<body><h1>Where the time went</h1>\n{svg}\n<pre>{text}</pre></body></html>\n"
    )
