"""Three things in a minute, without a GPU: a race found, a step overlapped, and an optimizer's state on a real disk.

    python examples/demo.py [--folder build/demo] [--only race overlap disk]

1. A common prefetcher of twenty lines has a bug that a test on a GPU seldom shows. The race detector of the simulated
   accelerator names both lines. Then `cudafuture.prefetch()` does the same work, with no race.
2. A training step in virtual time, the same on every machine: a blocking wait for each all_reduce, then the same step
   with futures, beside the least time that is possible.
3. Two processes and a disk: `train_gpt_remote.py`.

Each part checks what it says, ends with one sentence, and leaves a picture as .png and .html in the folder. The program
exits with the number of parts that failed.
"""

from __future__ import annotations

import argparse
import html
import json
import linecache
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure

from cudafuture import CUDAFuture, debug, gather, trace
from cudafuture.prefetch import prefetch
from cudafuture.testing import sim

HERE = Path(__file__).parent
PATIENCE = 600.0  # seconds for the processes


class Failed(Exception):
    """A part of the demo did not show what it says."""


# ---- 1. a race


class Prefetcher:
    """Copies the next batch to the device while the program uses this one. Do not use it: it has a bug."""

    def __init__(self, loader: Iterable[torch.Tensor], device: str) -> None:
        self.loader, self.device = iter(loader), device
        self.stream = torch.Stream(device)
        self.preload()

    def preload(self) -> None:
        """Start to copy the next batch, on a stream of its own."""
        self.ahead = next(self.loader, None)
        if self.ahead is not None:
            with self.stream:
                self.ahead = self.ahead.to(self.device, non_blocking=True)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.ahead is not None:
            torch.accelerator.current_stream().wait_stream(self.stream)
            batch = self.ahead
            self.preload()
            yield batch


def use(batches: Iterable[torch.Tensor]) -> float:
    """Run a model on each batch, and return the sum of its outputs."""
    weights = torch.ones(1000, 1000, device="sim")
    total = torch.zeros((), device="sim")
    for batch in batches:
        total += (batch @ weights).sum()
    return total.item()


def race(folder: Path) -> str:
    """Find the bug of the prefetcher, and show that `prefetch` does not have it."""
    sim.enable(schedule="jitter")
    loader = [torch.full((8, 1000), float(number)).pin_memory() for number in range(6)]
    try:
        with sim.detect_races():
            use(Prefetcher(loader, "sim"))
    except sim.RaceError as error:
        report = error.reports[0]
    else:
        raise Failed("the detector found no race in the prefetcher")
    if report.kind != "reuse" or report.earlier is None or report.later is None:
        raise Failed(f"the detector reports something else: {report}")
    with sim.detect_races():
        total = use(prefetch(loader, "sim"))
    if total != 8e6 * sum(range(6)):
        raise Failed(f"a wrong sum with prefetch(): {total}")
    print(report)
    draw_report(report, folder / "race")
    return "the prefetcher lacks a record_stream(), and the report names both lines; prefetch() has no race"


def source_of(site: sim.Site) -> tuple[str, list[tuple[bool, str]]]:
    """Return the operation of a site and its place, and the lines around it: True for the line itself."""
    place = next(line for line in reversed(site.stack) if Path(__file__).name in line)
    number = int(place.split(":")[1].split()[0])
    lines = [(n == number, linecache.getline(__file__, n).rstrip("\n")) for n in range(number - 3, number + 2)]
    return f"{site.operation}, {Path(__file__).name}:{number}", lines


def draw_report(report: sim.Report, file: Path) -> None:
    """Draw a report: both operations, each with its line in the source."""
    assert report.earlier is not None
    assert report.later is not None
    sites = [("first: ", *source_of(report.earlier)), ("then: ", *source_of(report.later))]
    figure = Figure(figsize=(12, 2.8))
    summary = report.summary.replace(": the memory", ":\nthe memory").replace(" again that ", " again\nthat ")
    figure.text(0.02, 0.94, f"{report.kind}: {summary}", va="top", weight="bold", family="monospace", size=10)
    page = [f"<h1>{report.kind}</h1><p>{html.escape(report.summary)}</p>"]
    for index, (word, place, lines) in enumerate(sites):
        left = 0.02 + 0.49 * index
        figure.text(left, 0.56, word + place, family="monospace", size=10, color="#d1495b")
        page.append(f"<h2>{word}{html.escape(place)}</h2><pre>")
        indent = min(len(text) - len(text.lstrip()) for _, text in lines if text)
        for row, (is_it, text) in enumerate(lines):
            box = {"facecolor": "#f7d6da", "edgecolor": "none", "pad": 3} if is_it else None
            figure.text(left, 0.42 - 0.09 * row, text[indent:] or " ", family="monospace", size=9, bbox=box)
            line = html.escape(text[indent:])
            page.append(f"<mark>{line}</mark>" if is_it else line)
        page.append("</pre>")
    figure.savefig(file.with_suffix(".png"), dpi=120)
    body = "\n".join(page).replace("<pre>\n", "<pre>")
    file.with_suffix(".html").write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>A race</title><body>{body}</body></html>\n'
    )


# ---- 2. the same step, overlapped

LAYERS = 20
BACKWARD, REDUCE, UPDATE = 5.0, 5.0, 0.1  # milliseconds, for each layer


class Step:
    """Backward of a model, an all_reduce for the gradient of each layer, and its update, in virtual time."""

    def __init__(self) -> None:
        self.communication = torch.Stream("sim")
        self.group = debug.OperationPlace.find("group", "dp")
        self.gradients = [torch.zeros(1, device="sim") for _ in range(LAYERS)]

    def backward(self, layer: int) -> torch.Tensor:
        """Compute a gradient, in this thread."""
        sim.spend(ms=BACKWARD)
        return self.gradients[layer]

    def all_reduce(self, layer: int, gradient: torch.Tensor) -> CUDAFuture[torch.Tensor]:
        """Enqueue a collective on a stream of its own."""
        reduced: CUDAFuture[torch.Tensor] = CUDAFuture(name="all_reduce")
        debug.register(reduced, self.group, number=layer, nbytes=gradient.nbytes)
        with self.communication:
            sim.sleep(ms=REDUCE)
            reduced.set_result(gradient)
        return reduced

    def update(self, reduced: CUDAFuture[torch.Tensor]) -> torch.Tensor:
        """Enqueue the optimizer's work."""
        sim.sleep(ms=UPDATE)
        return reduced.value()

    def blocking(self) -> None:
        """Wait for each collective."""
        for layer in reversed(range(LAYERS)):
            reduced = self.all_reduce(layer, self.backward(layer))
            reduced.wait()
            self.update(reduced)
        sim.synchronize()

    def overlapped(self) -> None:
        """Go on at once: the update runs behind its collective, on a stream of the pool."""
        layers = reversed(range(LAYERS))
        gather(*[self.all_reduce(n, self.backward(n)).then(self.update) for n in layers]).wait()


def overlap(folder: Path) -> str:
    """Run the step both ways, and compare the times with what they have to be."""
    took: dict[str, float] = {}
    exposed: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as traces:
        for name in ("blocking", "overlapped"):
            sim.enable(speeds=sim.Speeds(compute=1e18, copy=1e18, launch=0))
            step = Step()
            sim.synchronize()
            start = sim.clock()
            with trace.record(Path(traces, name)), trace.step(0):
                getattr(step, name)()
            took[name] = (sim.clock() - start) * 1e3
            exposed[name] = trace.analyse(Path(traces, name)).median("communication") * 1e3
        ideal = max(BACKWARD, REDUCE) * LAYERS + min(BACKWARD, REDUCE)
        wanted = {"blocking": (BACKWARD + REDUCE) * LAYERS + UPDATE, "overlapped": ideal + UPDATE}
        if any(abs(took[name] - wanted[name]) > 1e-3 for name in took):
            raise Failed(f"the steps take {took} ms in place of {wanted}")
        titles = {f"{name}: {took[name]:.1f} ms": Path(traces, name) for name in took}
        for ending in ("png", "html"):
            trace.plot(titles, folder / f"overlap.{ending}")
    return (
        f"in virtual time, a step of {took['blocking']:.1f} ms takes {took['overlapped']:.1f} ms with futures, "
        f"at least {ideal:.1f} ms; the thread waits {exposed['overlapped']:.1f} ms for communication in place of "
        f"{exposed['blocking']:.1f} ms"
    )


# ---- 3. real processes, a real disk


def disk(folder: Path) -> str:
    """Train with the optimizer's state on the other process's disk."""
    with tempfile.TemporaryDirectory(dir=folder) as own:  # on the disk of the pictures: others may be in memory
        report, traces = Path(own, "report.json"), Path(own, "traces")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(HERE / "train_gpt_remote.py"), "--json", str(report), "--trace", str(traces)]
        command += ["--folder", own]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, timeout=PATIENCE
        )
        if done.returncode != 0:
            raise Failed(f"{' '.join(command)} returned {done.returncode}\n{done.stdout}")
        print(done.stdout.splitlines()[0])
        results = json.loads(report.read_text())
        titles = {name: traces / name for name in ("blocking", "overlapped")}
        for ending in ("png", "html"):
            trace.plot(titles, folder / f"disk.{ending}")
    conclusion: str = results["conclusion"]
    return conclusion


PARTS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "race": ("Your prefetcher has this bug", race),
    "overlap": ("The same step, overlapped", overlap),
    "disk": ("Real processes, a real disk", disk),
}


def main() -> int:
    """Run the parts, and name the pictures; return the number of parts that failed."""
    parser = argparse.ArgumentParser(description="A race found, a step overlapped, and a state on a real disk.")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/demo"), help="for the pictures (default: build/demo)"
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts")
    args = parser.parse_args()
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder {args.folder}: {error.strerror}")
    failed = 0
    for number, name in enumerate(args.only, 1):
        title, part = PARTS[name]
        start = time.perf_counter()
        print(f"\n{number} of {len(args.only)}: {title}\n", flush=True)
        try:
            sentence = part(args.folder)
        except Exception as error:
            failed += 1
            print(f"FAILED: {'' if isinstance(error, Failed) else type(error).__name__ + ': '}{error}", flush=True)
            continue
        finally:
            sim.disable()
        print(f"-> {sentence}.\n   {args.folder}/{name}.png and .html, {time.perf_counter() - start:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
