"""Reprs of statistics, as a person reads them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
import torch

from cudafuture.statistics import StatisticsBase, text_of_bytes, text_of_seconds
from cudafuture.store import DiskStore

pytestmark = pytest.mark.usefixtures("on_the_host")


@dataclass(frozen=True, repr=False)
class Link(StatisticsBase):
    """Statistics of one link."""

    BYTES: ClassVar = frozenset({"sent"})
    SECONDS: ClassVar = frozenset({"median"})

    sent: int
    median: float
    latencies: tuple[tuple[float, int], ...]


@dataclass(frozen=True, repr=False)
class Network(StatisticsBase):
    """Statistics of some links."""

    SECONDS: ClassVar = frozenset({"busy"})

    name: str
    calls: int
    limit: int | None
    busy: dict[str, float]
    refused: dict[str, int]
    links: dict[str, Link]


def test_repr_has_a_line_for_each_field() -> None:
    links = {"w1": Link(1536, 0.00152, ((0.001, 1), (0.002, 3))), "w2": Link(0, float("nan"), ())}
    assert repr(Network("w0", 1234567, None, {"cpu": 2.5, "cuda:0": 3e-6}, {}, links)) == (
        "Network:\n"
        "  name     w0\n"
        "  calls    1,234,567\n"
        "  limit    -\n"
        "  busy     cpu 2.5 s, cuda:0 3 µs\n"
        "  refused  -\n"
        "  links\n"
        "    w1\n"
        "      sent       1.5 KiB\n"
        "      median     1.52 ms\n"
        "      latencies  4 in 2 buckets\n"
        "    w2\n"
        "      sent       0 B\n"
        "      median     -\n"
        "      latencies  -"
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1 << 20, "1 MiB"), (5 << 60, "5.12e+03 PiB"), (-1, "-1 B")],
)
def test_bytes_have_three_digits(nbytes: int, text: str) -> None:
    assert text_of_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (5e-10, "0.5 ns"), (0.9994, "999 ms"), (1, "1 s"), (86400, "86,400 s")]
)
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert text_of_seconds(seconds) == text


def test_statistics_of_a_store_are_read_at_a_glance(tmp_path: Any) -> None:
    with DiskStore(tmp_path, capacity=1 << 30) as store:
        store.write("a", torch.ones(1024)).wait()
        text = repr(store.statistics())
    assert "  capacity         1 GiB\n" in text
    assert "  bytes            4 KiB\n" in text


def test_units_name_fields() -> None:
    for name in (
        "cudafuture.pipeline",
        "cudafuture.prefetch",
        "cudafuture.swap",
        "cudafuture.testing.sim",
        "rpc_ext.store",
    ):
        importlib.import_module(name)
    own = [one for one in StatisticsBase.__subclasses__() if one.__module__.startswith(("cudafuture.", "rpc_ext."))]
    assert len(own) >= 10
    for one in own:
        names = {field.name for field in fields(one)}  # type: ignore[arg-type]
        assert names >= one.GAUGES | one.BYTES | one.SECONDS, one
        assert not one.BYTES & one.SECONDS, one
