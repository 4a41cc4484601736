"""Disks that are small, or that may only be read: what a test has to mount, or is skipped."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


@contextlib.contextmanager
def mount(root: Path, what: str, commands: Sequence[Sequence[str]]) -> Iterator[Path]:
    """Give a folder at which commands have mounted something; skip the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    root.mkdir()
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as e:
        pytest.skip(f"no {what} can be mounted here: {e}")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)  # also when a failed test still has files there


def small_disk(root: Path, size: int) -> contextlib.AbstractContextManager[Path]:
    """Give a file system in memory of so many bytes."""
    return mount(root, "tmpfs", [["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(root)]])


@contextlib.contextmanager
def read_only(there: Path, root: Path) -> Iterator[Path]:
    """Give another name of a folder, by which nothing can be written."""
    with mount(root, "folder", [["mount", "--bind", str(there), str(root)]]):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
        yield root
