"""The command ``python -m cudafuture``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cudafuture.config import config
from cudafuture.debug import look_at
from cudafuture.graph_breaks import break_graphs

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the arguments of the command line; return its exit status.

    >>> main(["ps", "0"])
    process 0: there is no process 0
    1
    """
    parser = argparse.ArgumentParser(prog="python -m cudafuture", description=__doc__)
    commands = parser.add_subparsers(required=True)
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
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


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
    """Return the numbers of the processes that have files in a folder of sockets."""
    files = [file for suffix in ("socket", "progress") for file in folder.glob(f"*.{suffix}")]
    return sorted({int(file.stem) for file in files if file.stem.isascii() and file.stem.isdecimal()})


break_graphs(main)
