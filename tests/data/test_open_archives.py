"""The end of processes that still have archives open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cudafuture.data import TgzImages
from cudafuture.data._archive_index import ArchiveReader, build_index
from cudafuture.errors import ArchiveError
from data.archives import images, numbers, write_archive
from support.child import run_script

CODE = """
import os, sys
from cudafuture.data import TgzImages
dataset = TgzImages(sys.argv[1])
first, second = iter(dataset), iter(dataset)
next(first), next(second)
if os.fork() == 0:
    del first  # the threads of its archive are in the parent only
    sys.exit(0)  # with an exit handler, and the other iterator
assert os.wait()[1] == 0
error = RuntimeError()
error.iterator = first
raise error
"""


@pytest.mark.slow
def test_process_and_fork_with_iterators_end(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(9))
    run = run_script(CODE, str(archive))
    assert run.returncode == 1, run.stderr
    assert run.stderr.endswith("RuntimeError\n")


def is_open(archive: Path) -> bool:
    files = Path("/proc/self/fd")
    return any(os.path.lexists(file) and Path(os.path.realpath(file)) == archive.resolve() for file in files.iterdir())


@pytest.mark.parametrize("index", ["auto", False])
@pytest.mark.parametrize("batch", [None, 2])
def test_kept_error_keeps_no_archive_open(tmp_path: Path, index: Any, batch: int | None) -> None:
    entries = [*images(2), ("a/bad.png", b"no image"), *images(4)[2:]]
    archive = write_archive(tmp_path, entries)
    iterator = iter(TgzImages(archive, index=index, batch=batch))
    found = numbers([next(iterator)])
    assert is_open(archive)
    with pytest.raises(ArchiveError, match=r"bad\.png") as kept:
        found.extend(number for item in iterator for number in numbers([item]))
    assert not is_open(archive)
    assert found + numbers(iterator) == [0, 1, 2, 3]  # it goes on behind the member
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("index", ["auto", False])
def test_iterator_continues_behind_refused_members(tmp_path: Path, index: Any) -> None:
    iterator = iter(TgzImages(write_archive(tmp_path, [("1.png", b""), ("2.png", b""), *images(2)]), index=index))
    for name in ("1", "2"):
        with pytest.raises(ArchiveError, match=rf"member '{name}\.png'"):
            next(iterator)
    assert numbers(iterator) == [0, 1]


def test_dropped_iterator_closes_archive_immediately(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(3))
    for _ in TgzImages(archive):
        break
    assert not is_open(archive)


@pytest.mark.parametrize("packing", ["tar", "tgz"])
def test_reader_can_be_closed_twice(tmp_path: Path, packing: str) -> None:
    archive = write_archive(tmp_path, images(1), packing)
    reader = ArchiveReader(str(archive), build_index(str(archive)))
    for _ in range(2):
        reader.close()
    assert not is_open(archive)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_missing_archive_is_plain_error(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(1))
    dataset = TgzImages(archive)
    archive.unlink()
    with pytest.raises(FileNotFoundError):
        list(dataset)
