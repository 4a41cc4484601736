"""Device maps that workers derive from the device lists of each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rpc_ext._codec import PayloadKind, decode, encode, kind_of, targets_of
from rpc_ext._devices import Plan, as_json, local_devices, plan

NAMES = ["a", "b"]


def at(*devices: str) -> list[torch.device]:
    return [torch.device(device) for device in devices]


def pairs(of: Any) -> dict[str, str]:
    return {str(here): str(there) for here, there in of.items()}


def make_plan(rank: int, counts: list[dict[str, int]], maps: list[Any]) -> Plan:
    return plan(rank, NAMES[: len(counts)], counts, [as_json(m) for m in maps])


def staged_pairs(found: Plan) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    return [pairs(of.staged) for of in found.calls], [pairs(of.staged) for of in found.answers]


def test_auto_pairs_common_devices() -> None:
    for rank in (0, 1):
        calls, answers = staged_pairs(make_plan(rank, [{"sim": 1}, {"sim": 3}], ["auto", "auto"]))
        assert calls[1 - rank] == answers[1 - rank] == {"sim:0": "sim:0"}
        own = {f"sim:{i}": f"sim:{i}" for i in range((1, 3)[rank])}
        assert calls[rank] == answers[rank] == own


def test_auto_pairs_nothing_across_types() -> None:
    for other in ({}, {"cuda": 2}):
        found = make_plan(0, [{"sim": 2}, other], ["auto", "auto"])
        assert staged_pairs(found) == ([{"sim:0": "sim:0", "sim:1": "sim:1"}, {}],) * 2


def test_reply_follows_map_of_caller() -> None:
    maps = [{"b": {"sim:0": "sim:1"}}, {"a": {"sim:1": "sim:1"}}]
    assert staged_pairs(make_plan(0, [{"sim": 2}] * 2, maps)) == ([{}, {"sim:0": "sim:1"}], [{}, {"sim:1": "sim:1"}])
    assert staged_pairs(make_plan(1, [{"sim": 2}] * 2, maps)) == ([{"sim:1": "sim:1"}, {}], [{"sim:1": "sim:0"}, {}])


def test_only_mapped_callers_get_device_replies() -> None:
    found = make_plan(1, [{"sim": 1}] * 2, ["auto", None])
    assert staged_pairs(found) == ([{}, {}], [{"sim:0": "sim:0"}, {}])


def test_unmapped_worker_gets_nothing() -> None:
    assert staged_pairs(make_plan(0, [{"sim": 1}] * 2, [{}, "auto"]))[0] == [{}, {}]
    assert staged_pairs(make_plan(0, [{"sim": 1}] * 2, [{"a": {"sim": "sim"}}, "auto"]))[0] == [
        {"sim:0": "sim:0"},
        {},
    ]


def test_tensorpipe_carries_its_own_pairs() -> None:
    found = make_plan(0, [{"cuda": 2}] * 2, [{"b": {"cuda:0": "cuda:1"}}, {"a": {"cuda:1": "cuda:1"}}])
    assert {worker: pairs(of) for worker, of in found.native.items()} == {"b": {"cuda:0": "cuda:1"}}
    assert {worker: pairs(of) for worker, of in found.native_reverse.items()} == {"b": {"cuda:1": "cuda:1"}}
    assert found.native_devices == at("cuda:0", "cuda:1")
    assert pairs(found.calls[1].native) == {"cuda:0": "cuda:1"}
    assert pairs(found.answers[1].native) == {"cuda:1": "cuda:1"}
    assert staged_pairs(found) == ([{}, {}], [{}, {}])


def test_mixed_device_types_use_host() -> None:
    counts, maps = [{"sim": 1}, {"cuda": 1}], [{"b": {"sim:0": "cuda:0"}}, None]
    caller, callee = make_plan(0, counts, maps), make_plan(1, counts, maps)
    assert (pairs(caller.calls[1].staged), caller.native, caller.native_devices) == ({"sim:0": "cuda:0"}, {}, [])
    assert (pairs(callee.answers[0].staged), callee.native_reverse) == ({"cuda:0": "sim:0"}, {})


@pytest.mark.parametrize("rank", [0, 1])  # everybody says so, not only who has made the mistake
@pytest.mark.parametrize(
    ("maps", "says"),
    [
        ({"c": {"sim:0": "sim:0"}}, "worker 'a' names c; the workers are a, b"),
        ({"b": {"sim:2": "sim:0"}}, "worker 'a' has no device sim:2; it has {'sim': 2}"),
        ({"b": {"sim:0": "sim:1"}}, "worker 'b' has no device sim:1; it has {'sim': 1}"),
        ({"b": {"cpu": "cpu"}}, "the host (cpu) of worker 'a' cannot be mapped. Leave it out"),
        ({"b": {"sim:0": "cpu"}}, "the host (cpu) of worker 'b' cannot be mapped. Leave it out"),
        ({"b": {"cuda:0": "sim:0"}}, "worker 'a' has no device cuda:0"),
        ({"b": {"sim:0": "sim:0", "sim:1": "sim:0"}}, "sends two devices to one of worker 'b'"),
    ],
)
def test_wrong_map_is_refused(rank: int, maps: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make_plan(rank, [{"sim": 2}, {"sim": 1}], [maps, "auto"])


@pytest.mark.parametrize("maps", ["cuda", 3, [("b", {})]])
def test_invalid_map_is_refused(maps: Any) -> None:
    with pytest.raises(TypeError, match="device_maps is 'auto', None, or a dict of dicts by worker"):
        as_json(maps)


def test_map_accepts_every_torch_device() -> None:
    assert as_json({"b": {torch.device("cuda", 1): 0}}) == {"b": {"cuda:1": str(torch.device(0))}}


def test_no_accelerator_means_no_devices() -> None:
    if not torch.accelerator.is_available():
        assert local_devices() == {}


@pytest.mark.sim(devices=3)
def test_accelerator_devices_are_counted() -> None:
    assert local_devices() == {"sim": 3}


@pytest.mark.sim(devices=2)
def test_message_names_targets_of_tensors() -> None:
    to_b = make_plan(0, [{"sim": 2}] * 2, [{"b": {"sim:0": "sim:1"}}, None]).calls[1]
    on_host, on_device = torch.zeros(1, device="cpu"), torch.zeros(1, device="sim:0")
    encoded = encode(PayloadKind.VALUE, {"x": [on_host, on_device]}, to_b)
    assert encoded.targets == targets_of(encoded.payload) == [None, "sim:1"]
    assert kind_of(encoded.payload) == PayloadKind.VALUE
    value = decode(encoded.payload, encoded.tensors)
    assert value["x"][0] is on_host
    assert value["x"][1] is on_device
    assert targets_of(encode(PayloadKind.VALUE, on_host, to_b).payload) is None


@pytest.mark.sim(devices=2)
def test_tensor_without_target_names_known_ones() -> None:
    counts = [{"sim": 2}] * 2
    some = make_plan(0, counts, [{"b": {"sim:0": "sim:1"}}, None]).calls[1]
    with pytest.raises(ValueError, match=r"on sim:1 cannot be sent to worker 'b'.*\(mapped: sim:0 to sim:1\)"):
        encode(PayloadKind.VALUE, torch.zeros(1, device="sim:1"), some)
    with pytest.raises(ValueError, match=r"on sim:0 cannot be sent to worker 'b'.*\(mapped: nothing\).*device_maps"):
        encode(PayloadKind.VALUE, torch.zeros(1, device="sim:0"), make_plan(0, counts, [None, None]).calls[1])
