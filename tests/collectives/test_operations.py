"""The table of operations: every row has a function, a method and a comparison with torch, and its facts fit these."""

from __future__ import annotations

import inspect

import pytest

import cudafuture.distributed as cfd
from cudafuture.distributed import _operations, collectives
from cudafuture.distributed._operations import DistributedOperation
from support.comparison import ALL

ROWS = {name: row for name, row in vars(_operations).items() if isinstance(row, DistributedOperation)}
ROOTED = [row for row in ROWS.values() if row.root is not None]
ON_TENSORS = [row for row in ROWS.values() if row.name in collectives.__all__]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_function_and_method(name: str) -> None:
    row = ROWS[name]
    assert name == row.name.upper()
    assert row.name in cfd.__all__
    function, method = getattr(cfd, row.name), getattr(cfd.ProcessGroup, row.name)
    assert method.__doc__ == function.__doc__


def test_every_tensor_collective_has_compared_row() -> None:
    names = {row.name for row in ON_TENSORS}
    functions = inspect.getmembers(collectives, inspect.isfunction)
    ours = {name: fn for name, fn in functions if fn.__module__ == collectives.__name__ and not name.startswith("_")}
    assert set(collectives.__all__) == ours.keys()
    assert names == {fn.__name__ for fn in ours.values()}  # the others are second names
    assert names - {make.__name__ for make in ALL} == {"barrier", "gather_single"}  # torch 2.14 has the second


@pytest.mark.parametrize("row", ROOTED, ids=lambda row: row.name)
def test_row_root_is_function_argument(row: DistributedOperation) -> None:
    assert {row.root, f"group_{row.root}"} <= inspect.signature(getattr(cfd, row.name)).parameters.keys()


@pytest.mark.parametrize("row", ON_TENSORS, ids=lambda row: row.name)
def test_row_output_is_written(row: DistributedOperation) -> None:
    if row.output is None:
        assert not row.roles
        return
    written_by = row.roles_elsewhere if row.root == "src" and row.roles_elsewhere else row.roles
    assert written_by[row.output] in "wx"
    assert len(row.roles_elsewhere or row.roles) == len(row.roles)
