"""Values and tensors of every kind in calls and replies. One worker that calls itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed import rpc

import rpc_ext
from cudafuture.errors import TensorError
from rpc_ext import rpc_async, rpc_sync
from support.comparison import DTYPES, bits, values
from support.parity import answers
from support.rpc_callees import ME, Adder, add, alone, same

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-values")]

ONES = torch.ones(2, 2)
torch_rpc: Any = rpc


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Boxed:
    tensor: torch.Tensor
    name: str = "box"


@answers("test_py_built_in", "test_py_user_defined", "test_scalar_add", "test_py_no_return_result")
@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2.5,
        1 + 2j,
        "text",
        "\udcff\0",
        b"\0" * 100_000,
        [],
        {},
        {1: (2, [3, {4}])},
        Point(1, "y"),
        Adder,
        1 << 99,
    ],
    ids=lambda v: type(v).__name__ + str(len(str(v))),
)
def test_values_arrive_unchanged(value: Any) -> None:
    returned = rpc_sync(ME, same, (value,))
    assert returned == value
    assert type(returned) is type(value)
    assert rpc_sync(ME, same, kwargs={"value": value}) == value


@answers("test_py_tensors", "test_py_tensors_in_container", "test_py_nested_pickle", "test_async_add", "test_nonzero")
def test_tensors_arrive_from_any_position() -> None:
    one = torch.randn(3, 4)
    array = np.arange(6.0).reshape(2, 3)
    sent = {"a": [one, (one + 1, {"b": one * 2})], "p": Point(one, array), "box": Boxed(one)}
    got = rpc_sync(ME, same, (sent,))
    assert torch.equal(got["a"][0], one)
    assert torch.equal(got["a"][1][0], one + 1)
    assert torch.equal(got["a"][1][1]["b"], one * 2)
    assert np.array_equal(got["p"].y, array)
    assert torch.equal(got["box"].tensor, one)
    # An object that occurs twice is one object there, and another one than here.
    assert got["a"][0] is got["p"].x is got["box"].tensor
    got["a"][0].zero_()
    assert one.any()
    assert [t.tolist() for t in rpc_sync(ME, torch.nonzero, (torch.eye(2),))] == [[0, 0], [1, 1]]


def test_every_dtype_arrives_or_is_refused() -> None:
    refused = []
    for dtype in DTYPES:
        tensor = values(dtype, 5, 3)
        try:
            got = rpc_sync(ME, same, (tensor,))
        except RuntimeError:
            refused.append(dtype)
        else:
            assert got.dtype == dtype
            assert torch.equal(bits(got), bits(tensor)), dtype
    assert all(str(dtype).startswith("torch.q") for dtype in refused)  # memory alone says nothing without a scale


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_quantized_tensors_arrive() -> None:
    for tensor in (
        torch.quantize_per_tensor(ONES, 0.5, 1, torch.qint8),
        torch.quantize_per_channel(ONES, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.quint8),
    ):
        got = rpc_sync(ME, same, (tensor,))
        assert torch.equal(got, tensor)
        assert got.qscheme() == tensor.qscheme()


@answers("test_non_cont_tensors", "test_tensor_view_as_return_value")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.arange(20).view(4, 5).narrow(1, 2, 2),
        torch.arange(20).view(4, 5).t(),
        torch.arange(5)[1:4],
        torch.ones(1).expand(1000, 1000),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.randn(1 << 21),
    ],
    ids=["scalar", "empty", "zero", "narrow", "t", "slice", "expanded", "channels", "conj", "neg", "8MiB"],
)
def test_views_and_strange_shapes_arrive(tensor: torch.Tensor) -> None:
    for got in (rpc_sync(ME, same, (tensor,)), rpc_ext.remote(ME, same, (tensor,)).to_here()):
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor)


def coo() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), check_invariants=True)  # type: ignore[arg-type]


@answers(
    "test_send_to_rank_sparse",
    "test_py_sparse_tensors_in_container",
    "test_self_py_udf_remote_sparse",
    "test_world_size_one_sparse",
    "test_multi_rpc_sparse",
    "test_builtin_remote_ret_sparse",
    "test_builtin_remote_self_sparse",
    "test_multi_builtin_remote_ret_sparse",
    "test_multi_py_udf_remote_sparse",
)
@pytest.mark.filterwarnings("ignore:.*CSR.*:UserWarning", "ignore:.*prototype.*:UserWarning")
@pytest.mark.parametrize(
    "make",
    [coo, lambda: coo().coalesce(), lambda: coo().to_sparse_csr(), lambda: coo().to_sparse_csc()],
    ids=["coo", "coalesced", "csr", "csc"],
)
def test_sparse_tensors_arrive(make: Any) -> None:
    tensor = make()
    for got in (
        *rpc_sync(ME, same, ([tensor],)),
        rpc_ext.remote(ME, same, (tensor,)).to_here(),
        rpc_sync(ME, torch.mul, (tensor, 1)),
    ):
        assert got.layout == tensor.layout
        assert got.layout != torch.sparse_coo or got.is_coalesced() == tensor.is_coalesced()
        assert torch.equal(got.to_dense(), tensor.to_dense())


@pytest.mark.slow  # torch imports much for them
@pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning", "ignore:.*deprecat.*")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_arrive(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)], layout=layout)
    got = rpc_sync(ME, same, (nested,))
    assert got.layout == layout
    assert [t.tolist() for t in got.unbind()] == [[1, 1], [0, 1, 2]]


def test_parameter_and_requires_grad_are_kept() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    got, leaf, of_graph = rpc_sync(ME, same, ((parameter, torch.ones(1, requires_grad=True), parameter * 2),))
    assert isinstance(got, torch.nn.Parameter)
    assert (got.requires_grad, leaf.requires_grad, of_graph.requires_grad) == (True, True, True)
    assert of_graph.is_leaf  # the graph stays here
    model = torch.nn.Linear(2, 3)
    assert torch.equal(rpc_sync(ME, model, (ONES,)), model(ONES))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(0, 5)[:, 4],
        lambda: resize(torch.ones(4), 0)[2:2],
        lambda: torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0, 5)[:, 4], (3, 3)),
        lambda: torch.nn.Parameter(torch.empty(0, 5)[:, 4]),
    ],
    ids=["slice", "shrunk", "sparse", "parameter"],
)
def test_empty_tensor_arrives_with_any_offset(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    with rpc_ext.batch(ME):
        batched = rpc_async(ME, same, ([tensor],))
    for got in (rpc_sync(ME, same, (tensor,)), *batched.wait(), rpc_ext.remote(ME, same, (tensor,)).to_here()):
        assert (got.shape, got.dtype, got.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad)
    if tensor.layout is torch.strided:
        assert torch_rpc.rpc_sync(ME, same, (tensor,)).shape == tensor.shape


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_quantized_tensor_without_elements_arrives() -> None:
    empty = torch.quantize_per_tensor(torch.empty(0, 5), 0.5, 1, torch.qint8)
    for tensor in (empty, empty[:, 4]):
        got = rpc_sync(ME, same, (tensor,))
        assert (got.shape, got.dtype, got.q_scale()) == (tensor.shape, tensor.dtype, 0.5)


def resize(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Resize the memory of a tensor, or of the values of a sparse one."""
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor
    values = tensor.values() if tensor.layout is torch.sparse_csr else values
    values.untyped_storage().resize_(nbytes)
    return tensor


class Marked(torch.Tensor):
    """A class of tensors that torch pickles."""


def without_scales() -> torch.Tensor:
    scales, zeros = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    tensor = torch.quantize_per_channel(torch.ones(2, 4), scales, zeros, 0, torch.qint8)
    tensor.q_per_channel_scales().untyped_storage().resize_(0)
    return tensor


UNSENDABLE: dict[str, Callable[[], torch.Tensor]] = {
    "freed": lambda: resize(torch.ones(4), 0),
    "shrunk": lambda: resize(torch.ones(8), 8),
    "freed parameter": lambda: torch.nn.Parameter(resize(torch.ones(4), 0)),
    "freed subclass": lambda: resize(torch.ones(4), 0).as_subclass(Marked),
    "freed scales": lambda: without_scales(),
    "freed values of CSR": lambda: resize(torch.eye(2).to_sparse_csr(), 0),
    "freed values": lambda: resize(torch.eye(2).to_sparse(), 0),
    "quint4x2": lambda: torch._empty_affine_quantized((2, 4), scale=0.5, zero_point=0, dtype=torch.quint4x2),
    "without a scheme": lambda: torch.empty(3, dtype=torch.qint8),
    "zeros": lambda: torch._efficientzerotensor((3,)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "opaque": lambda: torch.ones(3).to_mkldnn(),
    "meta": lambda: torch.ones(2, device="meta"),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
}


def make_unsendable(kind: str) -> torch.Tensor:
    return UNSENDABLE[kind]()


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_unsendable_tensor_is_refused(kind: str) -> None:
    tensor = UNSENDABLE[kind]()
    with pytest.raises(TensorError):
        rpc_async(ME, same, (tensor,))
    with rpc_ext.batch(ME), pytest.raises(TensorError):
        rpc_async(ME, same, ([tensor],))
    with pytest.raises(TensorError):
        rpc_ext.remote(ME, same, (tensor,))
    with pytest.raises(TensorError):
        rpc_sync(ME, make_unsendable, (kind,))
    assert rpc_sync(ME, same, (1,)) == 1


@pytest.mark.parametrize("kind", ["freed", "freed values", "zeros", "functional"])
def test_torch_calls_refuse_unsendable_tensor(kind: str) -> None:
    with pytest.raises(TensorError):
        torch_rpc.rpc_sync(ME, same, (UNSENDABLE[kind](),))
    with pytest.raises(RuntimeError, match=r"memory|storage"):
        torch_rpc.rpc_sync(ME, make_unsendable, (kind,))


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_tensor_inside_transform_is_refused(transform: Any) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TensorError, match="has no memory of its own"):
            rpc_sync(ME, same, (x,))
        return x

    transform(body)(torch.ones(3, 2))


def test_inference_and_no_grad_tensors_arrive() -> None:
    with torch.inference_mode():
        assert torch.equal(rpc_sync(ME, add, (ONES, 1)), ONES + 1)
    with torch.no_grad():
        assert rpc_async(ME, add, (ONES, 1)).then(lambda f: torch.is_grad_enabled()).wait() is False
