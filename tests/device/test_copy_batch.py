"""copy(pack=True), copy(out=) and copy(stream=), and streams of an owner's own."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch

from cudafuture import copy, own_stream, packed_nbytes, pool_stream, use_streams
from device.test_copy import DTYPES, LAYOUTS
from support.harness import SIZE, Device

Tensor = torch.Tensor


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


# ---- pack


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_copy_equals_single_copy(accelerator: Device, layout: str) -> None:
    x = LAYOUTS[layout](torch.arange(16.0).reshape(4, 4))
    first, packed = copy((torch.ones(3, dtype=torch.int8), x), accelerator.at(), pack=True).wait(non_blocking=True)
    single = copy(x, accelerator.at()).wait(non_blocking=True)
    assert type(packed) is Tensor
    assert (packed.device, packed.dtype, packed.shape) == (single.device, single.dtype, single.shape)
    assert packed.stride() == single.stride()
    assert not packed.requires_grad
    assert torch.equal(packed.cpu(), x.detach())
    assert storage_of(packed) == storage_of(first)
    assert first.data_ptr() % 512 == packed.data_ptr() % 512 == 0


def test_tensors_without_memory_are_packed(accelerator: Device) -> None:
    value = [torch._efficientzerotensor(3), torch.empty(0, 2), torch.ones(2)]
    zeros, nothing, packed = copy(value, accelerator.at(), pack=True).wait()
    assert (zeros.tolist(), nothing.shape, packed.tolist()) == ([0, 0, 0], (0, 2), [1, 1])


def test_every_dtype_is_packed(accelerator: Device) -> None:
    value = {dtype: torch.tensor([0, 1, 1, 0, 1]).to(dtype) for dtype in DTYPES}
    for dtype, packed in copy(value, accelerator.at(), pack=True).wait(non_blocking=True).items():
        assert packed.dtype is dtype
        assert torch.equal(packed.cpu(), value[dtype])


def test_conjugates_and_negatives_pack_by_value(accelerator: Device) -> None:
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    views = [z.conj(), z.conj().imag, z[::2].conj()]
    for view, packed in zip(views, copy(views, accelerator.at(), pack=True).wait(non_blocking=True), strict=True):
        assert torch.equal(packed.cpu(), view.resolve_conj().resolve_neg())


def test_unpackable_tensors_copy_beside(accelerator: Device) -> None:
    note = object()
    value: list[Any] = [torch.ones(2), note, torch.full((SIZE,), 3.0, device=accelerator.at())]
    packed, same, there = copy(value, accelerator.at(), pack=True).wait()
    assert packed.tolist() == [1, 1]
    assert same is note
    assert there.unique().tolist() == [3.0]


def test_large_pinned_tensors_use_slab(accelerator: Device) -> None:
    large = torch.arange(100_000.0).pin_memory()
    small, copied = copy([torch.ones(2), large], accelerator.at(), pack=True).wait()
    assert storage_of(small) == storage_of(copied)
    assert torch.equal(copied.cpu(), large)
    assert small.tolist() == [1, 1]


def test_large_batches_pack_beside_caller(accelerator: Device) -> None:
    large = torch.arange(400_000.0)
    small, copied = copy([torch.ones(2), large], accelerator.at(), pack=True).wait()
    assert storage_of(small) == storage_of(copied)
    assert torch.equal(copied.cpu(), large)


def test_host_target_disables_packing(device: Device) -> None:
    assert copy([torch.ones(2), torch.ones(1, device=device.at())], "cpu", pack=True).wait()[1].tolist() == [1]


def test_slab_is_written_after_earlier_use(accelerator: Device) -> None:
    with accelerator.hold():
        x = accelerator.produce(1.0)
        doubled = x * 2
        del x  # its memory is what the slab gets
        copying = copy(torch.full((SIZE,), 4.0), accelerator.at(), pack=True)
    assert accelerator.read(doubled) == 2.0
    assert accelerator.read(copying.wait(non_blocking=True)) == 4.0


def test_packed_copies_may_be_dropped_early(accelerator: Device) -> None:
    stream = accelerator.stream()
    with accelerator.hold(stream):
        copying = copy(torch.full((SIZE,), 4.0), accelerator.at(), pack=True, stream=stream)
        del copying
        gc.collect()
        others = [accelerator.empty().fill_(9.0) for _ in range(4)]
    accelerator.finish()
    assert [accelerator.read(x) for x in others] == [9.0] * 4


# ---- out


def test_packed_tensors_are_laid_into_out(accelerator: Device) -> None:
    value = [torch.ones(2), torch.arange(5)]
    out = torch.zeros(packed_nbytes(value), dtype=torch.uint8, device=accelerator.at())
    copies = copy(value, accelerator.at(), pack=True, out=out).wait()
    assert [x.tolist() for x in copies] == [[1, 1], [0, 1, 2, 3, 4]]
    assert {storage_of(x) for x in copies} == {storage_of(out)}
    again = out[512:]
    assert copy(value[0], accelerator.at(), pack=True, out=again).wait().data_ptr() == again.data_ptr()


def test_unpackable_out_is_refused(accelerator: Device) -> None:
    value = [torch.ones(2), torch.arange(500)]
    at = accelerator.at()
    with pytest.raises(ValueError, match=r"out needs 4608 bytes .* and has 4607 bytes"):
        copy(value, at, pack=True, out=torch.zeros(4607, dtype=torch.uint8, device=at))
    with pytest.raises(ValueError, match="begin at a multiple of 512"):
        copy(value, at, pack=True, out=torch.zeros(8000, dtype=torch.uint8, device=at)[1:])
    with pytest.raises(ValueError, match="one-dimensional tensor of uint8"):
        copy(value, at, pack=True, out=torch.zeros(8000, device=at))
    with pytest.raises(TypeError, match="not list"):
        copy(value, at, pack=True, out=value)
    with pytest.raises(ValueError, match="cannot be packed"):
        copy([torch.eye(2).to_sparse()], at, pack=True, out=torch.zeros(8000, dtype=torch.uint8, device=at))


@pytest.mark.parametrize("source", ["cpu", "device"])
@pytest.mark.parametrize("target", ["cpu", "device"])
def test_out_is_filled_and_returned(device: Device, source: str, target: str) -> None:
    places = {"cpu": torch.device("cpu"), "device": device.at()}
    value: dict[str, Any] = {"x": torch.arange(6.0, device=places[source]).reshape(2, 3), "note": 1}
    out: dict[str, Any] = {"x": torch.zeros(3, 2, device=places[target]).t(), "note": None}
    copied = copy(value, places[target], out=out).wait()
    assert copied["x"] is out["x"]
    assert torch.equal(copied["x"].cpu(), value["x"].cpu())
    assert copied["note"] == 1


@pytest.mark.parametrize(
    "out", [{"y": torch.ones(2)}, {"x": torch.ones(3)}, {"x": torch.ones(2).int()}, {"x": 1}, {"x": None}, 3]
)
def test_mismatched_out_is_refused(device: Device, out: Any) -> None:
    with pytest.raises(ValueError, match=r"copy\(\): out"):
        copy({"x": torch.ones(2)}, "cpu", out=out)


def test_out_is_written_after_earlier_work(accelerator: Device) -> None:
    with accelerator.hold():
        out = accelerator.produce(1.0)
        doubled = out * 2
        copying = copy(torch.full((SIZE,), 4.0), accelerator.at(), out=out)
    assert accelerator.read(doubled) == 2.0
    assert accelerator.read(copying.wait(non_blocking=True)) == 4.0


def test_out_may_be_dropped_early(accelerator: Device) -> None:
    stream = accelerator.stream()
    out = accelerator.produce(1.0)
    with accelerator.hold(stream):
        copying = copy(accelerator.make_pinned(4.0), accelerator.at(), out=out, stream=stream)
        del copying, out
        gc.collect()
        others = [accelerator.empty().fill_(9.0) for _ in range(4)]
    accelerator.finish()
    assert [accelerator.read(x) for x in others] == [9.0] * 4


# ---- stream


@pytest.mark.parametrize("pack", [False, True])
def test_copies_run_on_given_stream(accelerator: Device, pack: bool) -> None:
    stream = accelerator.stream()
    with accelerator.hold(stream):
        copying = copy(torch.full((SIZE,), 4.0), accelerator.at(), stream=stream, pack=pack)
        assert not copying.ready()
    assert copying.wait().unique().tolist() == [4.0]


def test_host_copies_run_on_source_stream(accelerator: Device) -> None:
    stream = accelerator.stream()
    x = accelerator.produce(4.0)
    with accelerator.hold(stream):
        copying = copy(x, "cpu", stream=stream)
        assert not copying.ready()
    assert copying.wait().unique().tolist() == [4.0]


def test_stream_of_other_device_is_refused(pair: Device) -> None:
    wanted = f"stream is on {pair.at(1)}, but the copies run on {pair.at(0)}"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        copy(torch.ones(2), pair.at(0), stream=pair.stream(index=1))
    with pytest.raises(ValueError, match="the copies run on no device"):
        copy(torch.ones(2), "cpu", stream=pair.stream(index=1))


# ---- own streams


def test_own_stream_is_exclusive(accelerator: Device) -> None:
    own = [own_stream(accelerator.at()) for _ in range(3)]
    ids = {stream.stream_id for stream in own}
    assert len(ids) == 3
    pool = {pool_stream(accelerator.at()).stream_id for _ in range(64)}
    assert not ids & pool
    assert {stream.device for stream in own} == {accelerator.at()}


def test_released_stream_gets_next_owner(accelerator: Device) -> None:
    own = own_stream(accelerator.at(), -1)
    before = own.stream_id
    other = own_stream(accelerator.at(), 0)
    assert other.stream_id != before
    del own
    assert own_stream(accelerator.at(), -1).stream_id == before


def test_work_runs_on_own_stream(accelerator: Device) -> None:
    own = own_stream(accelerator.at(), -1)
    with accelerator.hold(), use_streams(own):
        x = torch.full((SIZE,), 3.0, device=accelerator.at())
        own.synchronize()  # beside what is held
    assert x.unique().tolist() == [3.0]


def test_own_stream_ignores_current_device(pair: Device) -> None:
    with pair.select(0):
        assert own_stream(pair.at(1)).device == pair.at(1)
        assert pair.current_index() == 0


def test_priority_above_zero_is_refused(accelerator: Device) -> None:
    with pytest.raises(ValueError, match="lower is more urgent"):
        own_stream(accelerator.at(), 1)
