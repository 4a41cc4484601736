"""Reads and writes compared with a model while I/Os fail, are interrupted, end early and complete late."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudafuture import CUDAFuture
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File
from support.patience import PATIENCE
from support.soak import soak_count

SIZE = 1 << 17  # of the file

pytestmark = [pytest.mark.xdist_group("store-model"), pytest.mark.usefixtures("on_the_host")]


class Operation:
    """A read or a write of a range of the file, by a tensor with any alignment and stride."""

    def __init__(self, writes: bool, begin: int, size: int, shift: int, strided: bool) -> None:
        self.writes, self.begin, self.end = writes, begin, min(SIZE, begin + size)
        whole = torch.zeros(2 * (self.end - begin) + 1024, dtype=torch.uint8)
        whole = whole[-whole.data_ptr() % 512 + shift :]
        self.tensor = whole[: 2 * (self.end - begin) : 2] if strided else whole[: self.end - begin]
        self.future: CUDAFuture[int] = CUDAFuture()

    def begin_in(self, file: File, number: int) -> None:
        if self.writes:
            content = torch.arange(self.begin, self.end) * 7 + number
            self.tensor.copy_(content.remainder(251).to(torch.uint8))
        self.future = (file.write if self.writes else file.read)(self.tensor, self.begin)


OPERATIONS = st.builds(
    Operation,
    writes=st.booleans(),
    begin=st.integers(0, SIZE - 1) | st.integers(0, SIZE // 4096 - 1).map(lambda page: page * 4096),
    size=st.integers(0, 600) | st.integers(0, SIZE) | st.integers(0, 8).map(lambda pages: pages * 4096),
    shift=st.sampled_from([0, 0, 1, 64]),
    strided=st.booleans(),
)
ROUNDS = st.lists(st.lists(OPERATIONS, min_size=1, max_size=8), min_size=1, max_size=12)
RATES = st.sampled_from([0.0, 0.0, 0.05, 0.3])
ENGINES = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["auto", "threads"]),
        "queue_depth": st.sampled_from([1, 3, 16]),
        "block_size": st.sampled_from([4096, 16384]),
        "threads": st.sampled_from([1, 4]),
        "_faults": st.fixed_dictionaries(
            {
                "seed": st.integers(0, 1 << 30),
                "io_error": RATES,
                "no_space": RATES,
                "again": RATES,
                "interrupted": RATES,
                "cut_short": RATES,
                "late": RATES,
            }
        ),
    }
)


def select_disjoint(operations: list[Operation]) -> list[Operation]:
    """Return operations that overlap no write of each other. Overlapping ones would have no defined order."""
    chosen: list[Operation] = []
    for new in operations:
        if all(new.end <= o.begin or o.end <= new.begin or not (new.writes or o.writes) for o in chosen):
            chosen.append(new)
    return chosen


@settings(max_examples=soak_count(2000), deadline=None)
@given(rounds=ROUNDS, options=ENGINES, direct=st.sampled_from(["auto", False]))
def test_futures_match_file_content(rounds: list[list[Operation]], options: dict[str, object], direct: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, Engine(**options) as engine:  # type: ignore[arg-type]
        path = Path(folder, "file")
        path.write_bytes(bytes(SIZE))
        model = torch.zeros(SIZE, dtype=torch.uint8)
        known = torch.ones(SIZE, dtype=torch.bool)
        with File(path, "r+", engine=engine, direct=direct) as file:
            for number, operations in enumerate(rounds):
                now = select_disjoint(operations)
                for operation in now:
                    operation.begin_in(file, number)
                for operation in now:
                    check(operation, model, known)
        assert engine.statistics().pending == 0
        there = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        assert torch.equal(there[known], model[known])


def check(operation: Operation, model: torch.Tensor, known: torch.Tensor) -> None:
    """Compare an operation with the model, and apply it to the model."""
    part = slice(operation.begin, operation.end)
    error = operation.future.exception(timeout=PATIENCE)
    if error is not None:
        assert isinstance(error, StorageError), error
        assert error.errno in ({errno.EIO, errno.ENOSPC} if operation.writes else {errno.EIO})
        assert (error.offset, error.wanted) == (operation.begin, operation.end - operation.begin)
        assert 0 <= error.got < error.wanted
        if operation.writes:
            known[part] = False
        return
    assert operation.future.value() == operation.end - operation.begin
    if operation.writes:
        model[part] = operation.tensor
        known[part] = True
    else:
        assert torch.equal(operation.tensor[known[part]], model[part][known[part]])
