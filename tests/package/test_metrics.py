"""OpenMetrics text of the counters and histograms of a process."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cudafuture import metrics, openmetrics
from cudafuture.io import Engine
from cudafuture.pipeline import Workers
from cudafuture.store import DiskStore

pytestmark = pytest.mark.usefixtures("on_the_host")


@dataclass
class Inner:
    """Statistics of one part."""

    calls: int
    latencies: tuple[tuple[float, int], ...]


@dataclass
class Statistics:
    """Statistics of each kind."""

    GAUGES: ClassVar = frozenset({"pending"})

    reads: int = 3
    pending: int = 1
    capacity: int | None = None
    median: float = float("nan")
    name: str = "not a number"
    refused: dict[str, int] = field(default_factory=lambda: {"": 2})
    parts: dict[str, Inner] = field(default_factory=lambda: {"a": Inner(4, ((0.5, 1), (1.0, 2)))})


class Example:
    """Source of statistics."""

    is_closed = False

    def statistics(self) -> Statistics:
        if self.is_closed:
            raise RuntimeError("closed")
        return Statistics()


def samples(prefix: str) -> dict[str, float]:
    """Return the samples whose names begin with a prefix; the text is parsed by Prometheus's own parser."""
    found = {}
    parse: Any = text_string_to_metric_families
    for family in parse(metrics()):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_fields_are_counters_gauges_and_histograms() -> None:
    source = Example()
    openmetrics.add(source, "example", place='a "b"\n')
    place = 'place=a "b"\n'
    assert samples("cudafuture_example") == {
        f"cudafuture_example_reads_total{{{place}}}": 3,
        f"cudafuture_example_pending{{{place}}}": 1,
        f"cudafuture_example_refused_total{{{place},refused=}}": 2,
        f"cudafuture_example_calls_total{{{place},parts=a}}": 4,
        f"cudafuture_example_latencies_seconds_bucket{{{place},parts=a,le=0.5}}": 1,
        f"cudafuture_example_latencies_seconds_bucket{{{place},parts=a,le=1.0}}": 3,
        f"cudafuture_example_latencies_seconds_bucket{{{place},parts=a,le=+Inf}}": 3,
    }


def test_sources_with_the_same_labels_are_added_up() -> None:
    both = Example(), Example()
    for one in both:
        openmetrics.add(one, "twice")
    found = samples("cudafuture_twice")
    assert found["cudafuture_twice_reads_total{}"] == 6
    assert found["cudafuture_twice_latencies_seconds_bucket{parts=a,le=1.0}"] == 6


def test_closed_and_dead_sources_are_left_out() -> None:
    closed, dead = Example(), Example()
    openmetrics.add(closed, "closed")
    openmetrics.add(dead, "dead")
    closed.is_closed = True
    del dead
    gc.collect()
    assert samples("cudafuture_closed") == samples("cudafuture_dead") == {}


def test_engines_stores_and_workers_have_metrics(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store, Workers(["cpu"]) as workers, Engine() as engine:
        store.write("a", torch.ones(4)).wait()
        workers.submit("cpu", int).wait()
        found = samples("cudafuture_")
        assert engine.statistics().reads == 0
    (written,) = (name for name in found if "store_writes_total" in name and str(tmp_path) in name)
    assert found[written] == 1
    assert found["cudafuture_workers_completed_total{}"] >= 1
    assert any(name.startswith("cudafuture_engine_blocks_total") for name in found)
