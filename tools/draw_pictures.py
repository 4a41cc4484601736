"""Draws the pictures of the docs.

    python tools/draw_pictures.py [FOLDER]

FOLDER is docs/pictures unless given. The layers come from a table of docs/architecture.md, and the table of 1F1B from
the library.

`make demo` draws the other two, race.png and overlap.png, in build/demo.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from cudafuture.pipeline import Schedule

ROOT = Path(__file__).parents[1]
BLUE, GREEN, RED, YELLOW, GREY = "#dbe9f4", "#dcefe1", "#f7d6da", "#fbeccb", "#eeeeee"
LINE = "#44505c"


class Drawing:
    """Boxes and arrows. Coordinates are in inches, from the left and from the top."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.axis("off")

    def text(
        self, x: float, y: float, text: str, *, size: float = 10, align: str = "center", bold: bool = False
    ) -> None:
        """Write `text`, in the middle of its line at `y`."""
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, text, size=size, ha=align, va="center", weight=weight, color="#1c2733")

    def box(
        self, x: float, y: float, width: float, height: float, text: str, colour: str, *, bold: bool = False
    ) -> None:
        """Draw a box, whose upper left corner is at (x, y), with `text` in its middle."""
        style = "round,pad=0,rounding_size=0.06"
        shape = FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor=LINE, linewidth=0.8)
        self.axes.add_patch(shape)
        self.text(x + width / 2, y + height / 2, text, bold=bold)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], text: str = "", *, bend: float = 0) -> None:
        """Draw an arrow, with `text` above its middle."""
        line = {"arrowstyle": "-|>", "color": LINE, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops={**line, "connectionstyle": f"arc3,rad={bend}"})
        self.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.12, text, size=9)

    def rule(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw a broken line."""
        self.axes.plot(*zip(start, end, strict=True), color=LINE, linewidth=0.8, linestyle=(0, (5, 4)))

    def save(self, path: Path) -> None:
        """Write the picture as SVG, whose text stays text."""
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cudafuture"}):
            self.figure.savefig(path, metadata={"Date": None, "Creator": None})


def layers_of(page: str) -> list[list[str]]:
    """Return the rooms of each layer, from the top, as the first table of the architecture page has them."""
    table = page.partition("## Rooms")[2].partition("|---|---|\n")[2].partition("\n\n")[0]
    return [re.findall(r"`([\w.]+)`", row.split("|")[1]) for row in table.splitlines()]


def rooms(path: Path) -> None:
    """Draw the layers: a room imports from those below it."""
    layers = layers_of((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    width, row = 10.0, 0.44
    drawing = Drawing(width, row * len(layers) + 0.75)
    y = 0.12
    for names in layers:
        colour = YELLOW if names[0].startswith("rpc_ext") else RED if names == ["_C"] else BLUE
        each = (width - 0.24) / len(names)
        for column, name in enumerate(names):
            drawing.box(0.12 + column * each, y, each - 0.08, row - 0.1, name, colour)
        y += row
        if names == ["rpc_ext"]:
            drawing.rule((0.12, y + 0.16), (width - 0.2, y + 0.16))
            drawing.text(width / 2, y + 0.04, "only public names of cudafuture; in C++, only _C/api", size=9)
            y += 0.34
    drawing.save(path)


def future(path: Path) -> None:
    """Draw how a future is completed, and its states."""
    drawing = Drawing(11, 5.5)
    for x, title in ((1.2, "producer"), (4.6, "the future"), (8.9, "consumers")):
        drawing.text(x, 0.2, title, bold=True, size=11)
    engines = "set_result()\nor an engine: a collective,\na call, a read, a copy,\na callback"
    drawing.box(0.15, 1.0, 2.1, 1.3, engines, BLUE)
    steps = (
        "1. find the tensors of the value",
        "2. record one event for each device",
        "3. publish the state",
        "4. release the waiters",
        "5. hand out the callbacks",
    )
    drawing.box(2.98, 0.34, 3.24, 2.68, "", "#ffffff")
    for number, step in enumerate(steps):
        drawing.box(3.1, 0.45 + 0.52 * number, 3.0, 0.42, step, GREEN)
    drawing.arrow((2.25, 1.65), (2.98, 1.65))
    for number, text in ((2, "done() is True"), (3, "wait(), await, as_completed() go on")):
        y = 0.66 + 0.52 * number
        drawing.box(7.2, y - 0.21, 3.6, 0.42, text, GREY)
        drawing.arrow((6.1, y), (7.2, y))
    y = 0.66 + 0.52 * 4
    callback = "callback: on an executor, a serial queue,\nthe callback thread, or inline"
    drawing.box(7.2, y - 0.21, 3.6, 0.6, callback, GREY)
    drawing.arrow((6.1, y), (7.2, y))
    drawing.box(7.2, y + 0.8, 3.6, 0.6, "child future; its events:\nthose of the callback's streams", GREEN)
    drawing.arrow((9.0, y + 0.39), (9.0, y + 0.8))

    drawing.box(0.15, 4.1, 1.3, 0.42, "pending", YELLOW, bold=True)
    for number, (state, colour) in enumerate((("complete", GREEN), ("failed", RED), ("cancelled", GREY))):
        drawing.box(2.5, 3.5 + 0.6 * number, 1.3, 0.42, state, colour, bold=True)
        drawing.arrow((1.45, 4.31), (2.5, 3.71 + 0.6 * number))
    drawing.box(4.95, 3.5, 1.3, 0.42, "ready", GREEN, bold=True)
    drawing.arrow((3.8, 3.71), (4.95, 3.71), "the devices")
    drawing.box(4.95, 4.1, 1.3, 0.42, "late error", RED, bold=True)
    drawing.arrow((3.8, 3.71), (4.95, 4.31))
    drawing.text(3.15, 5.3, "done: in one of these three", size=9)
    drawing.save(path)


def write(path: Path) -> None:
    """Draw the way of a write to the disk of another worker, with the numbers of the architecture page."""
    lanes = ("program", "client", "agent", "agent", "service", "store", "engine, disk")
    width, left, step = 12.0, 0.8, 1.72
    places = [left + step * lane for lane in range(len(lanes))]
    middle = (places[2] + places[3]) / 2
    drawing = Drawing(width, 4.75)
    machines = ((0.05, middle - 0.05, "a worker"), (middle + 0.05, width - 0.05, "another, with the disk"))
    for start, end, machine in machines:
        drawing.box(start, 0.05, end - start, 4.65, "", "#f8f8f8")
        drawing.text(start + 0.15, 0.2, machine, size=9, align="left")
    for place, lane in zip(places, lanes, strict=True):
        drawing.box(place - 0.6, 0.4, 1.2, 0.36, lane, BLUE, bold=True)
        drawing.rule((place, 0.76), (place, 4.6))
    arrows: Sequence[tuple[int, int, str]] = (
        (0, 1, "1 write: a future"),
        (1, 2, "2 bytes, digests"),
        (2, 3, "3 message, seal"),
        (3, 4, "4 the key's turn"),
        (4, 5, "5 quota"),
        (5, 6, "6 blocks of a slab"),
        (6, 5, "7 written, synced"),
        (5, 4, "8 acknowledged"),
        (4, 3, "8 reply"),
        (3, 2, "8 reply"),
        (2, 1, "9 reply"),
        (1, 0, "9 future complete"),
    )
    for number, (start, end, text) in enumerate(arrows):
        y = 1.12 + 0.3 * number
        drawing.arrow((places[start], y), (places[end], y), text)
    drawing.save(path)


def chain(path: Path) -> None:
    """Draw the futures of one parameter in the tutorial's training step."""
    drawing = Drawing(11, 2.3)
    drawing.box(0.15, 0.2, 2.5, 0.5, "all_reduce of the gradient", BLUE)
    drawing.box(0.15, 1.2, 2.5, 0.5, "the state that was read", GREEN)
    drawing.box(3.5, 0.7, 1.2, 0.5, "update", YELLOW)
    drawing.arrow((2.65, 0.45), (3.5, 0.88))
    drawing.arrow((2.65, 1.45), (3.5, 1.02))
    drawing.box(5.5, 0.7, 1.8, 0.5, "write the state", GREEN)
    drawing.arrow((4.7, 0.95), (5.5, 0.95))
    drawing.box(8.1, 0.7, 2.7, 0.5, "read it for the next step", GREEN)
    drawing.arrow((7.3, 0.95), (8.1, 0.95))
    drawing.box(5.5, 1.6, 5.3, 0.5, "the next forward of this layer waits for this, and for nothing else", GREY)
    drawing.arrow((4.1, 1.2), (5.5, 1.85), bend=0.2)
    drawing.save(path)


def one_f_one_b(path: Path) -> None:
    """Draw the table of 1F1B, with a backward that takes twice as long as a forward."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cudafuture"}):
        Schedule.one_f_one_b(stages=4, microbatches=8).picture(path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "rooms.svg": rooms,
    "future.svg": future,
    "write.svg": write,
    "chain.svg": chain,
    "one-f-one-b.svg": one_f_one_b,
}


def main() -> None:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    for name, draw in PICTURES.items():
        draw(folder / name)


if __name__ == "__main__":
    main()
