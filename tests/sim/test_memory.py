"""Device memory and pinned memory."""

from __future__ import annotations

import gc

import pytest
import torch

from cudafuture.testing import sim
from support.child import run_script

pytestmark = pytest.mark.sim(devices=2, schedule="lazy")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_fresh_memory_is_poisoned(dtype: torch.dtype) -> None:
    assert torch.empty(1000, dtype=dtype, device="sim").isnan().all().item()


def test_reused_memory_is_poisoned_again() -> None:
    x = torch.ones(1000, device="sim")
    address = x.data_ptr()
    del x
    y = torch.empty(1000, device="sim")
    assert y.data_ptr() == address
    assert y.isnan().all().item()


def test_poison_can_be_off() -> None:
    sim.enable(poison=False)
    x = torch.ones(1000, device="sim")
    del x
    assert torch.empty(1000, device="sim").sum().item() == 1000


def test_bytes_in_use_are_counted() -> None:
    before = sim.statistics().allocated_bytes
    x = torch.empty(1 << 20, dtype=torch.uint8, device="sim:1")
    assert sim.statistics().allocated_bytes - before == 1 << 20
    del x
    assert sim.statistics().allocated_bytes == before


def test_torch_reads_statistics_of_each_device() -> None:
    memory = torch.accelerator
    gc.collect()
    other = memory.memory_allocated(0), memory.max_memory_allocated(0)
    allocated, reserved = memory.memory_allocated(1), memory.memory_reserved(1)  # by what earlier tests have left
    x = torch.empty(1 << 20, dtype=torch.uint8, device="sim:1")
    memory.reset_peak_memory_stats(1)
    memory.reset_accumulated_memory_stats(1)
    y = torch.empty(2 << 20, dtype=torch.uint8, device="sim:1")
    assert memory.memory_allocated(1) - allocated == memory.memory_reserved(1) - reserved == 3 << 20
    del y
    stats = memory.memory_stats(1)
    assert stats["allocated_bytes.all.current"] - allocated == 1 << 20
    assert stats["allocated_bytes.all.peak"] - allocated == 3 << 20
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 2 << 20
    memory.reset_peak_memory_stats(1)
    assert memory.max_memory_allocated(1) - allocated == 1 << 20
    assert memory.max_memory_reserved(1) - reserved == memory.memory_reserved(1) - reserved == 3 << 20
    memory.empty_cache()
    assert memory.memory_reserved(1) - reserved == 1 << 20
    assert (memory.memory_allocated(0), memory.max_memory_allocated(0)) == other
    del x


def test_too_much_is_refused_with_numbers() -> None:
    sim.enable(memory=1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="sim:0"):
        torch.empty(2 << 20, dtype=torch.uint8, device="sim")
    assert torch.ones(4, device="sim").sum().item() == 4


def test_allocation_waits_for_streams_before_failing() -> None:
    sim.enable(schedule="lazy", memory=4 << 20)
    side = torch.Stream("sim")
    addresses = set()
    for _ in range(10):
        x = torch.zeros(3 << 20, dtype=torch.uint8, device="sim")
        addresses.add(x.data_ptr())
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.add_(1)
        x.record_stream(side)
        del x
    assert len(addresses) == 1  # there is room for one only


def test_cache_can_be_emptied() -> None:
    x = torch.ones(1 << 20, device="sim")
    sim.synchronize()
    before = sim.statistics().reserved_bytes
    del x
    torch.accelerator.memory.empty_cache()
    assert sim.statistics().reserved_bytes <= before
    assert torch.ones(1 << 20, device="sim").sum().item() == 1 << 20


def test_empty_tensor_has_no_memory() -> None:
    x = torch.empty(0, 3, device="sim")
    assert x.data_ptr() == 0
    assert x.sum().item() == 0


def test_storage_grows_and_keeps_content() -> None:
    x = torch.arange(4.0, device="sim")
    x.resize_(8)
    assert x[:4].tolist() == [0, 1, 2, 3]


def test_pinned_memory_reports_itself() -> None:
    assert not torch.ones(4).is_pinned()
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned.tolist() == [0, 1, 2, 3]
    assert torch.empty(4, pin_memory=True).is_pinned()


def test_pinned_memory_in_flight_is_kept() -> None:
    pinned = torch.ones(1000).pin_memory()
    address = pinned.data_ptr()
    x = pinned.to("sim", non_blocking=True)
    del pinned
    other = torch.full((1000,), 7.0).pin_memory()
    assert other.data_ptr() != address
    assert x.sum().item() == 1000
    del other


def test_copy_from_pageable_memory_reads_immediately() -> None:
    host = torch.ones(1000)
    x = host.to("sim", non_blocking=True)
    host.fill_(5)
    assert x.sum().item() == 1000


def test_copy_into_pageable_memory_writes_immediately() -> None:
    x = torch.ones(1000, device="sim")
    host = torch.zeros(1000)
    host.copy_(x, non_blocking=True)
    assert host.sum().item() == 1000


@pytest.mark.parametrize("schedule", ["free", "lazy"])
def test_device_copy_is_ordered_on_both(schedule: sim.Schedule) -> None:
    sim.enable(devices=2, schedule=schedule)
    x = torch.arange(1000.0, device="sim:0")
    y = torch.zeros(1000, device="sim:1")
    y.add_(1)
    y.copy_(x, non_blocking=True)
    y.add_(1)
    assert y.sum().item() == 999 * 500 + 1000


def test_same_program_gets_same_addresses() -> None:
    def addresses() -> list[int]:
        base = torch.empty(1, device="sim").data_ptr()
        kept = [torch.empty(n, device="sim") for n in (10, 1000, 100000, 10)]
        return [t.data_ptr() - base for t in kept]

    assert addresses() == addresses()


def test_host_read_of_device_address_is_reported() -> None:
    code = """if True:
        import ctypes, torch
        from cudafuture.testing import sim
        sim.enable(devices=2)
        ctypes.string_at(torch.ones(4, device="sim:1").data_ptr(), 4)
    """
    run = run_script(code)
    assert run.returncode != 0
    assert "sim:1" in run.stderr
    assert ".cpu()" in run.stderr
