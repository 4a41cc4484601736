"""Command line of fakecuda: ``python -m cudafuture.testing.fakecuda [OPTIONS] -- COMMAND`` runs a command."""

from __future__ import annotations

import argparse
import os
import sys

from cudafuture.testing.fakecuda._environment import environment

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Replace this process by the command, with an environment in which torch finds the fake devices."""
    parser = argparse.ArgumentParser(
        prog="python -m cudafuture.testing.fakecuda",
        description="Run a command, and the processes that it starts, on fake CUDA devices.",
    )
    parser.add_argument("--schedule", choices=["lazy", "jitter", "eager"], default="lazy", help="default: lazy")
    parser.add_argument("--seed", type=int, default=1, help="of the jitter schedule; default: 1")
    parser.add_argument("--devices", type=int, default=2, help="number of devices; default: 2")
    parser.add_argument("--memory", type=int, default=4096, metavar="MIB", help="memory of each device; default: 4096")
    parser.add_argument(
        "--races",
        action="store_true",
        help="detect races between streams: fakecuda.detect_races() raises their reports, fakecuda.races() returns "
        "them, and each process logs at its end those that it has not taken",
    )
    parser.add_argument("--verbose", action="store_true", help="report contexts and kernels that are not run")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    given = parser.parse_args(arguments)
    try:
        variables = environment(
            schedule=given.schedule,
            seed=given.seed,
            devices=given.devices,
            memory=given.memory << 20,
            races=given.races,
            verbose=given.verbose,
        )
    except (RuntimeError, ValueError, OSError) as e:
        sys.exit(f"fakecuda: {e}")
    try:
        os.execvpe(given.command[0], given.command, variables)
    except OSError as e:
        sys.exit(f"fakecuda: {given.command[0]} cannot be run: {e.strerror}")


if __name__ == "__main__":
    main()
