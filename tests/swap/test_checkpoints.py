"""Checkpoints of optimizer state: names, replacement, crashes, and other chunk sizes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from cudafuture.errors import NotFoundError
from cudafuture.storage import Engine, Offloader
from soak import SOAK
from swap.training import OPTIMIZERS, Pair, same
from unit.child import Child

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pair(store: Offloader) -> Pair:
    return Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,), (3,)), chunk_bytes=1 << 16, memory=1000)


def test_a_checkpoint_gives_back_state_and_options(pair: Pair, store: Offloader) -> None:
    pair.offloaded.save("empty")
    for _ in range(3):
        pair.step()
    used = store.statistics().used
    pair.offloaded.save("third step")
    assert store.statistics().used < used + 8192, "the checkpoint copies tensors"
    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.optimizer.param_groups[0]["lr"] = pair.offloaded.param_groups[0]["lr"] = 0.9
    for _ in range(2):
        pair.step()
    assert pair.offloaded.checkpoints() == ["empty", "third step"]
    pair.optimizer.load_state_dict(saved)
    pair.offloaded.load("third step")
    assert pair.offloaded.param_groups[0]["lr"] == 0.001
    pair.expect_same()
    for _ in range(3):
        pair.step()
    pair.expect_same()
    pair.offloaded.load("empty")
    assert len(pair.offloaded.state) == 0


def test_a_checkpoint_is_read_with_other_chunks_and_buffers(pair: Pair, store: Offloader) -> None:
    for _ in range(3):
        pair.step()
    pair.offloaded.save("here")
    pair.offloaded.close()
    assert pair.offloaded is not None
    for options in ({"chunk_bytes": 1 << 20}, {"chunk_bytes": 70_000, "prefetch": 0}, {"memory": 1 << 20}):
        other = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,), (3,)), name="optimizer", **options)
        other.offloaded.load("here")
        for i, parameter in enumerate(other.swapped):
            expected = pair.optimizer.state[pair.plain[i]]
            found = other.offloaded.state_of(parameter)
            assert all(same(value, found[name]) for name, value in expected.items())
        other.offloaded.close()


def test_a_checkpoint_of_the_same_name_is_replaced_and_can_be_deleted(pair: Pair, store: Offloader) -> None:
    pair.step()
    pair.offloaded.save("latest")
    keys = len(store.keys())
    for _ in range(3):
        pair.step()
        pair.offloaded.save("latest")
    assert len(store.keys()) == keys
    pair.offloaded.load("latest")
    pair.expect_same()
    pair.offloaded.delete_checkpoint("latest")
    assert pair.offloaded.checkpoints() == []
    pair.offloaded.close()
    assert store.keys() == []


def test_what_is_no_checkpoint_is_refused(pair: Pair, store: Offloader) -> None:
    pair.offloaded.save("there")
    with pytest.raises(NotFoundError, match="no checkpoint 'elsewhere'; there are: 'there'"):
        pair.offloaded.load("elsewhere")
    with pytest.raises(NotFoundError):
        pair.offloaded.delete_checkpoint("elsewhere")
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="checkpoint"):
            pair.offloaded.save(name)
    pair.offloaded.close()
    other = Pair(OPTIMIZERS["Adam"], store, ((5, 5),))
    with pytest.raises(ValueError, match=r"\(200, 201\)"):
        other.offloaded.load("there")


def test_a_step_and_a_checkpoint_are_killed(tmp_path: Path) -> None:
    """The last checkpoint whose save() has returned can be loaded, and is whole."""
    for number in range(100 if SOAK else 2):
        folder = tmp_path / f"{number}"
        with Child(TRAINS_FOR_EVER, str(folder)) as child:
            while (said := int(child.hear())) < number % 7 + 1:
                pass
            child.process.kill()
            child.process.wait()
        with Offloader(folder, durable=True) as store:
            pair = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (77,)), chunk_bytes=1 << 16)
            steps = sorted(pair.offloaded.checkpoints())
            assert steps == ["latest"]
            pair.offloaded.load("latest")
            state = pair.offloaded.state_of(pair.swapped[0])
            assert state["step"] >= said
            assert all(torch.equal(state["exp_avg"].view(-1)[0].expand(200, 201), state["exp_avg"]) for _ in range(1))
            weights = 1 - 0.9 ** state["step"].item()
            assert torch.allclose(state["exp_avg"], torch.full((200, 201), weights), rtol=1e-4)
            pair.offloaded.close()


TRAINS_FOR_EVER = """
import sys, torch
from cudafuture.storage import Engine, Offloader
from cudafuture.swap import offload
parameters = [torch.nn.Parameter(torch.ones(200, 201)), torch.nn.Parameter(torch.ones(77))]
store = Offloader(sys.argv[1], durable=True)
optimizer = offload(torch.optim.Adam(parameters), store, min_bytes=0, chunk_bytes=1 << 16)
step = 0
while True:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    step += 1
    optimizer.save("latest")
    say(step)
"""


def test_a_state_dict_reads_nothing_until_its_tensors_are_used(tmp_path: Path) -> None:
    with Engine() as engine, Offloader(tmp_path, engine=engine) as store:
        pair = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (70_001,), (2 * 16_384 + 100,)), chunk_bytes=1 << 16)
        pair.step()
        before = engine.statistics().blocks
        states = pair.offloaded.state_dict()["state"]
        assert engine.statistics().blocks == before
        for number, plain in enumerate(pair.plain):
            assert all(same(states[number][name], value) for name, value in pair.optimizer.state[plain].items())
        pair.step()  # the mapped tensors keep the old values
        assert states[1]["exp_avg"].shape == (70_001,)
        assert not same(states[1]["exp_avg"], pair.optimizer.state[pair.plain[1]]["exp_avg"])
