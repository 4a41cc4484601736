"""The search for the tensors of a value, at any depth."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudafuture import _tensors
from cudafuture._tensors import find_tensors, search_objects
from cudafuture.errors import TensorSearchError


@dataclasses.dataclass
class Data:
    x: object
    rest: object = None


class Attributes:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


class Slots:
    __slots__ = ("__private", "x")

    def __init__(self, x: object, private: object) -> None:
        self.x = x
        self.__private = private


class SlotsChild(Slots):
    __slots__ = "more"  # a single name is allowed as well

    def __init__(self, x: object, private: object, more: object) -> None:
        super().__init__(x, private)
        self.more = more


Pair = namedtuple("Pair", "first second")


def tensors(n: int) -> list[Tensor]:
    return [torch.full((2,), i) for i in range(n)]


def same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return [id(t) for t in found] == [id(t) for t in expected]


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: [a, b],
        lambda a, b: (a, [b]),
        lambda a, b: {"k": a, "l": {"m": b}},
        lambda a, b: OrderedDict(a=a, b=b),
        lambda a, b: Pair(a, b),
        lambda a, b: Data(a, Data(b)),
        lambda a, b: Attributes(a=a, b=[b]),
        lambda a, b: Slots(a, b),
        lambda a, b: SimpleNamespace(a=(a,), b=b),
        lambda a, b: [1, "text", None, a, object(), b],
        lambda a, b: [a, [a, b], a],
        lambda a, b: SlotsChild(None, a, b),
    ],
)
def test_tensors_are_found_each_once(make: Callable[[Tensor, Tensor], object]) -> None:
    a, b = tensors(2)
    assert sorted(id(t) for t in find_tensors(make(a, b))) == sorted((id(a), id(b)))


def test_search_keeps_order_of_value() -> None:
    parts = tensors(4)
    assert same(find_tensors([parts[0], {"x": parts[1]}, (parts[2], parts[3])]), parts)


def test_sets_and_keys_are_searched() -> None:
    a, b = tensors(2)
    assert len(find_tensors([{a}, {b: 1}, frozenset({a})])) == 2


def test_cycles_are_harmless() -> None:
    (a,) = tensors(1)
    ring: list[object] = [a]
    ring.append(ring)
    node: Any = Attributes(t=a)
    node.me = node
    assert same(find_tensors([ring, node]), [a])


def test_deep_nesting_is_searched_without_recursion() -> None:
    (a,) = tensors(1)
    nested: object = a
    for _ in range(100_000):
        nested = [nested]
    assert same(find_tensors(nested), [a])


def test_failed_search_explains_naming_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "_MAX_OBJECTS", 2)
    a, b = tensors(2)
    value = Attributes(a=a, b=Data(b))
    with pytest.raises(TensorSearchError, match=r"test_tensors\.Attributes' gave up after 2 objects.*tensors=\["):
        find_tensors(value)
    assert same(search_objects([value], value, True), [a])


def test_endlessly_made_objects_end_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            return {"next": Endless()}

    monkeypatch.setattr(_tensors, "_MAX_OBJECTS", 1000)
    with pytest.raises(TensorSearchError, match="Endless"):
        find_tensors(Endless())


def test_search_skips_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "_MAX_OBJECTS", 2)
    (a,) = tensors(1)
    assert same(find_tensors([*range(1000), *map(str, range(1000)), None, 1.5, torch, a]), [a])


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_sparse_tensors_count_every_storage() -> None:
    dense = torch.eye(3, device="cpu")
    coo = dense.to_sparse()
    assert len(find_tensors(coo)) == 2
    assert len(find_tensors(dense.to_sparse_csr())) == 3
    assert len(find_tensors(dense.to_sparse_csc())) == 3


def test_subclass_counts_its_parts() -> None:
    class TwoTensors(torch.Tensor):
        a: Tensor
        b: Tensor

        @staticmethod
        def __new__(cls, a: Tensor, b: Tensor) -> TwoTensors:
            self = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
            self.a, self.b = a, b
            return self

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["a", "b"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            return NotImplemented

    a, b = tensors(2)
    assert same(find_tensors([TwoTensors(a, b)]), [a, b])
    parameter = torch.nn.Parameter(torch.ones(1))
    assert same(find_tensors(Attributes(p=parameter)), [parameter])


def test_nothing_is_pickled() -> None:
    class Unpicklable:
        def __init__(self, t: Tensor) -> None:
            self.t = t

        def __reduce__(self) -> tuple[Any, ...]:
            raise AssertionError("pickled")

    (a,) = tensors(1)
    assert same(find_tensors(Unpicklable(a)), [a])
