"""The command ``cudafuture``, which is also ``python -m cudafuture``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cudafuture import bench, trace
from cudafuture._progress import is_alive, read_progress, start_of
from cudafuture.config import config
from cudafuture.debug import look_at
from cudafuture.doctor import examine
from cudafuture.graph_breaks import break_graphs
from cudafuture.statistics import text_of_bytes
from cudafuture.store import DiskStore

__all__ = ["main"]

_JOB_START = 60.0  # seconds between the starts of the first and the last process of a job, at most


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the arguments of the command line; return its exit status.

    >>> main(["ps", "0"])
    process 0: there is no process 0
    1
    """
    parser = argparse.ArgumentParser(
        prog="cudafuture", description="Look at programs that use cudafuture, and at machines."
    )
    commands = parser.add_subparsers(required=True)
    _add_ps(commands)
    _add_trace(commands)
    _add_doctor(commands)
    _add_store(commands)
    _add_bench(commands)
    options = parser.parse_args(arguments)
    trace.discard()
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, ImportError, bench.Skipped) as e:
        sys.stderr.write(f"{e}\n")
        return 2
    return status


def _add_ps(commands: Any) -> None:
    ps = commands.add_parser(
        "ps",
        help="show what is pending in processes, and who waits for whom",
        description="Show what is pending in processes, and who waits for whom. No process gets a signal.",
    )
    ps.add_argument("process", metavar="PID", type=int, nargs="*", help="number of a process")
    ps.add_argument(
        "--job", metavar="FOLDER", type=Path, help="all processes with a socket or progress in CUDAFUTURE_DEBUG_DIR"
    )
    ps.set_defaults(run=_ps)


def _ps(options: argparse.Namespace) -> int:
    """Print the report; return 1 if a process did not answer."""
    processes: list[int] = options.process
    folder: Path | None = options.job
    if not processes or folder is not None:
        where = folder or Path(config.debug_dir or os.devnull)
        if not where.is_dir():
            sys.stderr.write(f"there is no folder of sockets {where}: no process has used an engine\n")
            return 1
        processes = processes + _processes_in(where)
        folder = where
    job = look_at(processes, folder)
    sys.stdout.write(f"{job if job.reports else f'no process has a socket in {folder}'}\n")
    return int(any(report.problem for report in job.reports))


def _processes_in(folder: Path) -> list[int]:
    """Return the numbers of the processes that have files in a folder of sockets, but for those of earlier jobs.

    A dead rank is of an earlier job if the last sign of it is a minute older than the first living process.
    """
    files = [file for suffix in ("socket", "progress") for file in folder.glob(f"*.{suffix}")]
    numbers = {int(file.stem) for file in files if file.stem.isascii() and file.stem.isdecimal()}
    first = min((start for number in numbers if (start := start_of(number)) is not None), default=0.0)

    def is_of_earlier_job(number: int) -> bool:
        progress = read_progress(folder / f"{number}.progress")
        if progress is None or progress.worker or is_alive(number) or (folder / f"{number}.socket").exists():
            return False
        with contextlib.suppress(FileNotFoundError):
            since_boot = max((group.issued_at for group in progress.groups), default=0) / 1e9
            issued = time.time() - time.monotonic() + since_boot
            return max(issued, (folder / f"{number}.progress").stat().st_mtime) + _JOB_START < first
        return False

    return sorted(number for number in numbers if not is_of_earlier_job(number))


def _add_trace(commands: Any) -> None:
    about = "show where the time of a traced program went"
    parts = commands.add_parser("trace", help=about, description=about).add_subparsers(required=True)
    what = "a file, or a folder with the files of all ranks"
    summary = parts.add_parser("summary", help="print where the time of a step went")
    summary.add_argument("trace", type=Path, help=what)
    summary.set_defaults(run=lambda options: _print(trace.analyse(options.trace)))
    compare = parts.add_parser("compare", help="print the medians of the steps of two traces")
    compare.add_argument("before", type=Path, help=what)
    compare.add_argument("after", type=Path, help=what)
    compare.set_defaults(run=lambda options: _print(trace.compare(options.before, options.after)))
    plot = parts.add_parser("plot", help="draw a timeline and a bar for each step")
    plot.add_argument("trace", type=Path, nargs="+", help=f"{what}; several have one scale of time")
    plot.add_argument("output", type=Path, help="a .png, .svg or .html file to write")
    plot.set_defaults(run=_plot)
    merge = parts.add_parser("merge", help="write one Chrome JSON file, for ui.perfetto.dev")
    merge.add_argument("trace", type=Path, help=what)
    merge.add_argument("output", type=Path, help="the file to write")
    merge.add_argument("--profile", type=Path, action="append", default=[], help="a file of torch.profiler to add")
    merge.set_defaults(run=lambda options: _done(trace.merge, options.trace, options.output, options.profile))


def _print(result: object) -> int:
    sys.stdout.write(f"{result}\n")
    return 0


def _plot(options: argparse.Namespace) -> int:
    """Draw one trace, or several with their paths as titles."""
    several = {str(path): path for path in options.trace}
    return _done(trace.plot, several if len(several) > 1 else options.trace[0], options.output)


def _done(function: Callable[..., None], *arguments: object) -> int:
    function(*arguments)
    return 0


def _add_doctor(commands: Any) -> None:
    about = "check what this machine can do, and say how to mend what it cannot"
    doctor = commands.add_parser("doctor", help=about, description=about)
    doctor.add_argument("--folder", type=Path, help="where stores will be (default: the folder for temporary files)")
    doctor.add_argument("--json", action="store_true", help="print one JSON list")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Print the findings, each when it is known; return 1 if something is broken."""
    findings = []
    for finding in examine(options.folder):
        findings.append(finding)
        if not options.json:
            advice = f"\n{'':8}{finding.advice}" if finding.advice and finding.state != "ok" else ""
            sys.stdout.write(f"{finding.state:<8}{finding.name}: {finding.found}{advice}\n")
            sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps([finding.as_json() for finding in findings], indent=1) + "\n")
    return int(any(finding.state == "broken" for finding in findings))


def _add_store(commands: Any) -> None:
    about = "look into a durable store on disk, which no process writes now"
    parts = commands.add_parser("store", help=about, description=about).add_subparsers(required=True)
    for name, run, what in (
        ("ls", _list_keys, "print each key with its size, dtype and shape, in the order of the last writes"),
        ("stat", lambda store: _print(store.statistics()), "print what the store has, and the size of its files"),
        ("verify", _verify, "read all tensors, and print the keys whose bytes do not match their checksums"),
    ):
        part = parts.add_parser(name, help=what, description=what)
        part.add_argument("folder", type=Path, help="the folder of the store")
        part.set_defaults(run=partial(_look_into, run))


def _look_into(look: Callable[[DiskStore], int], options: argparse.Namespace) -> int:
    with DiskStore(options.folder, durable=True, read_only=True) as store:
        return look(store)


def _list_keys(store: DiskStore) -> int:
    keys = store.keys()
    for key in keys:
        entry = store.stat(key)
        dtype = str(entry.dtype).removeprefix("torch.")
        sys.stdout.write(f"{text_of_bytes(entry.nbytes):>9}  {dtype}{list(entry.shape)}  {key}\n")
    return 0


def _add_bench(commands: Any) -> None:
    about = "measure the library beside its peers on this machine"
    part = commands.add_parser("bench", help=about, description=f"{about}. Without a suite: list the suites.")
    part.add_argument("suite", nargs="?", metavar="SUITE", help=f"one of {', '.join(bench.names())}")
    part.add_argument(
        "--only", nargs="+", default=[], metavar="ROW", help="rows, or the beginning of several up to a hyphen"
    )
    part.add_argument("--rounds", type=int, help="a row shows medians over so many (default: the suite's)")
    part.add_argument("--json", metavar="PATH", help="write the rows there; a folder: with the machine's kind")
    part.add_argument("--plot", type=Path, metavar="PATH", help="draw the rows into a .png, .svg or .pdf file")
    part.add_argument("--check", action="store_true", help="return 1 when a limit is broken")
    part.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    """Measure a suite; return 1 if a row failed, or broke its limit where that is checked."""
    if options.suite is None:
        given = (options.only, options.rounds, options.json, options.plot, options.check)
        if any(value not in ([], None, False) for value in given):
            raise ValueError("name a suite before its options")
        for name in bench.names():
            sys.stdout.write(f"{name:<12} {_title(name)}\n")
        return 0
    report = None if options.json is None else Path(options.json)
    if report is not None and options.json.endswith("/"):
        report.mkdir(parents=True, exist_ok=True)
    outcomes = bench.run(options.suite, options.only, rounds=options.rounds, json=report, plot=options.plot)
    bad = {"failed", "over"} if options.check else {"failed"}
    return int(any(outcome.verdict in bad for outcome in outcomes))


def _title(name: str) -> str:
    try:
        suite = bench.load(name)
    except bench.Skipped as e:
        return f"(skipped: {e})"
    except ValueError as e:
        return f"({e})"
    return f"{suite.title}: {len(suite.rows)} rows"


def _verify(store: DiskStore) -> int:
    """Print the damaged keys; return 1 if there are any."""
    found = store.statistics()
    whole = text_of_bytes(found.bytes)
    shows_progress = sys.stderr.isatty()

    def show(done: int) -> None:
        sys.stderr.write(f"\r{text_of_bytes(done)} of {whole}\033[K")
        sys.stderr.flush()

    damaged = store.verify(show if shows_progress else None)
    if shows_progress:
        sys.stderr.write("\r\033[K")
    for key, error in damaged.items():
        sys.stdout.write(f"{key}: {error}\n")
    sys.stdout.write(f"{found.keys} keys, {whole}: {len(damaged) or 'none'} damaged\n")
    return int(bool(damaged))


break_graphs(main)
