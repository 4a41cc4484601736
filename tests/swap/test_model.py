"""Random sequences of calls on an offloaded optimizer, beside the same calls on a plain one in memory."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cudafuture.errors import NotFoundError, SwapError
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from cudafuture.testing import FaultyEngine
from support.soak import soak_count
from support.training import OPTIMIZERS, Pair, same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("swap-model")]

SHAPES = ((200, 201), (4097,), (3,), ())
NAMES = ("a", "b")
INDEX = st.integers(0, 5)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["backward", "backward", "step", "step", "step", "zero_grad"]), st.just(None)),
    st.tuples(st.sampled_from(["freeze", "thaw", "drop", "state", "set_state", "forget"]), INDEX),
    st.tuples(st.just("learning rate"), st.sampled_from([0.1, 0.001])),
    st.tuples(st.sampled_from(["save", "load", "delete"]), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["add", "state_dict", "flush", "clip"]), st.just(None)),
)
OPTIONS = st.fixed_dictionaries(
    {
        "chunk_bytes": st.sampled_from([1 << 16, 1 << 24]),
        "memory": st.sampled_from([0, 40_000]),
        "prefetch": st.sampled_from([0, 2]),
        "buffer_bytes": st.sampled_from([None, 1 << 20]),  # units of many chunks, and of one each
        "min_bytes": st.sampled_from([0, 1 << 14]),
        "swap_gradients": st.booleans(),
    }
)


class Sequence:
    """A pair of optimizers, and what has been saved of the plain one."""

    def __init__(self, name: str, store: DiskStore, options: dict[str, Any]) -> None:
        self.pair = Pair(OPTIMIZERS[name], store, SHAPES, **options)
        self.saved: dict[str, tuple[int, dict[str, Any]]] = {}
        self.uses_gradients_up = options["swap_gradients"]  # torch would use them again
        self.applied: set[int] = set()  # the parameters whose gradients a step has used up

    def parameters(self, index: int) -> tuple[nn.Parameter, nn.Parameter]:
        return self.pair.plain[index % len(self.pair.plain)], self.pair.swapped[index % len(self.pair.swapped)]

    def do(self, action: str, argument: Any) -> None:
        pair = self.pair
        if action == "backward":
            self.backward()
        elif action == "step":
            self.step()
        elif action == "zero_grad":
            self.zero_grad()
        elif action in ("freeze", "thaw"):
            for parameter in self.parameters(argument):
                parameter.requires_grad_(action == "thaw")
        elif action == "drop":
            for parameter in self.parameters(argument):
                parameter.grad = None
        elif action == "state":
            self.expect_same()
        elif action in ("set_state", "forget"):
            self.set_state(argument, action == "set_state")
        elif action == "learning rate":
            for optimizer in (pair.optimizer, pair.offloaded):
                optimizer.param_groups[0]["lr"] = argument
        elif action == "add" and len(pair.plain) < 6:
            new = nn.Parameter(pair.random((70, 71), torch.float32))
            pair.plain.append(new)
            pair.swapped.append(copy.deepcopy(new))
            for optimizer, parameters in ((pair.optimizer, pair.plain), (pair.offloaded, pair.swapped)):
                optimizer.add_param_group({"params": [parameters[-1]], "lr": 0.05})
        elif action == "state_dict":
            states = pair.offloaded.state_dict()
            pair.optimizer.load_state_dict(copy.deepcopy(states))
            pair.offloaded.load_state_dict(states)
            if self.applied:  # a new state has not used the gradients
                self.zero_grad()
        elif action == "flush":
            pair.offloaded.flush()
        elif action == "clip":
            self.clip()
        elif action in ("save", "load", "delete"):
            self.checkpoint(action, argument)

    def backward(self) -> None:
        """Accumulate gradients, unless a step has used the ones that are there."""
        if self.applied:
            self.zero_grad()
        for plain, swapped in zip(self.pair.plain, self.pair.swapped, strict=True):
            if plain.requires_grad:
                gradient = self.pair.random(tuple(plain.shape), plain.dtype)
                for parameter in (plain, swapped):
                    (parameter * gradient).sum().backward()

    def zero_grad(self) -> None:
        self.pair.optimizer.zero_grad()
        self.pair.offloaded.zero_grad()
        self.applied.clear()

    def step(self) -> None:
        """Make a step; the plain optimizer skips the gradients that it has used, where the offloaded one does."""
        plain = self.pair.plain
        kept = {i: plain[i].grad for i in self.applied}
        for i in self.applied:
            plain[i].grad = None
        self.pair.optimizer.step()
        for i, gradient in kept.items():
            plain[i].grad = gradient
        self.pair.offloaded.step()
        if self.uses_gradients_up:
            self.applied = {i for i, parameter in enumerate(plain) if parameter.grad is not None}

    def clip(self) -> None:
        if not self.applied and any(parameter.grad is not None for parameter in self.pair.plain):
            norm = nn.utils.clip_grad_norm_(self.pair.plain, 0.5)
            assert same(self.pair.offloaded.clip_grad_norm_(0.5), norm)

    def set_state(self, index: int, whole: bool) -> None:
        plain, swapped = self.parameters(index)
        state: dict[str, Any] = {}
        if whole and self.pair.optimizer.state.get(plain):
            state = copy.deepcopy(self.pair.optimizer.state[plain])
            for value in state.values():
                if value.shape == plain.shape:
                    value.add_(0.5)
        self.pair.optimizer.state[plain] = copy.deepcopy(state)
        self.pair.offloaded.set_state(swapped, state)
        for i, parameter in enumerate(self.pair.plain):  # a new state has not used the gradient
            if parameter is plain and i in self.applied:
                plain.grad = swapped.grad = None
                self.applied.discard(i)

    def checkpoint(self, action: str, name: str) -> None:
        pair = self.pair
        if action == "save":
            pair.offloaded.save(name)
            self.saved[name] = len(pair.plain), copy.deepcopy(pair.optimizer.state_dict())
        elif name not in self.saved:
            with pytest.raises(NotFoundError):
                getattr(pair.offloaded, "load" if action == "load" else "delete_checkpoint")(name)
        elif action == "delete":
            pair.offloaded.delete_checkpoint(name)
            del self.saved[name]
        elif self.saved[name][0] == len(pair.plain):
            pair.offloaded.load(name)
            pair.optimizer.load_state_dict(copy.deepcopy(self.saved[name][1]))
            self.zero_grad()
        else:
            with pytest.raises(ValueError, match="has parameters of the shapes"):
                pair.offloaded.load(name)
        assert pair.offloaded.checkpoints() == sorted(self.saved)

    def expect_same(self) -> None:
        for plain, swapped in zip(self.pair.plain, self.pair.swapped, strict=True):
            assert same(plain.detach(), swapped.detach())
            expected, found = self.pair.optimizer.state.get(plain, {}), self.pair.offloaded.state_of(swapped)
            assert found.keys() == expected.keys()
            assert all(same(value, found[name]) for name, value in expected.items())


@settings(max_examples=soak_count(600), deadline=None)
@given(st.sampled_from(["AdamW", "SGD, momentum", "SGD"]), OPTIONS, st.lists(ACTIONS, min_size=1, max_size=25))
def test_any_sequence_of_calls_equals_plain_optimizer(
    name: str, options: dict[str, Any], actions: list[tuple[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, DiskStore(folder) as store:
        sequence = Sequence(name, store, options)
        for action, argument in actions:
            sequence.do(action, argument)
        sequence.expect_same()
        sequence.pair.offloaded.close()
        saved = [key for key in store.list_keys().wait() if "/checkpoints/" in key]
        assert len(saved) == len(sequence.saved)
        assert not [key for key in store.list_keys().wait() if "/state/" in key]


@settings(max_examples=soak_count(600), deadline=None)
@given(OPTIONS, st.integers(0, 1 << 30), st.sampled_from([0.02, 0.2]), st.lists(st.booleans(), min_size=3, max_size=8))
def test_repeated_steps_apply_once_after_random_failures(
    options: dict[str, Any], seed: int, rate: float, calls: list[bool]
) -> None:
    """`calls`: whether the state of a parameter is looked at after each step."""
    engine = FaultyEngine("threads", seed=seed, io_error=rate, no_space=rate / 2, cut_short=rate, late=0.2)
    with tempfile.TemporaryDirectory() as folder, engine, DiskStore(folder, engine=engine) as store:
        pair = Pair(OPTIMIZERS["AdamW"], store, SHAPES, **options)
        for looks in calls:
            pair.give_gradients()
            pair.optimizer.step()
            for _ in range(1000):
                try:
                    pair.offloaded.step()
                    break
                except SwapError:
                    pass
            else:
                raise AssertionError("a thousand attempts have failed")
            if looks:
                with contextlib.suppress(SwapError):
                    pair.offloaded.state_of(pair.swapped[0])
        for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
            assert same(plain.detach(), swapped.detach())


def test_offload_takes_existing_state(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], store, SHAPES, name="first")
    pair.step()
    given_one = OPTIMIZERS["AdamW"](pair.swapped)
    given_one.load_state_dict(pair.offloaded.state_dict())
    pair.offloaded.close()
    pair.offloaded = offload(given_one, store, min_bytes=0)
    pair.step()
    pair.expect_same()
