"""CUDAFUTURE_DEBUG=ownership: a tensor that changes too early fails the operation that owns it, and names the line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cudafuture.ownership import ENABLED, owns
from support.child import run_script

CHECKED = """
import os, sys
import torch
import torch.distributed as dist
import cudafuture, rpc_ext
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.errors import OwnershipError
from cudafuture.ownership import owns
from cudafuture.io import File, empty
from cudafuture.store import DiskStore, ShardedStore
from cudafuture.swap import offload
from cudafuture.testing import FaultyEngine

os.chdir(sys.argv[1])
LARGE = 1 << 18  # elements: not copied into a batch

def expect(future, name, line):
    errors = [future.exception()] + ([] if future.released is None else [future.released.exception()])
    for error in errors:
        assert isinstance(error, OwnershipError), error
        assert name in str(error) and f"<string>:{line} in " in str(error), error

def line():
    return sys._getframe(1).f_lineno

# ---- stores and files: bytes are compared, so changes through numpy count, and those of other parts do not
engine = FaultyEngine("threads", held=True)
store = DiskStore("a", engine=engine)
both = ShardedStore([store, DiskStore("b", engine=engine)])
file = File("file", "w", engine=engine)
multipart = store.begin_write("parts", torch.float32, [LARGE])
whole = empty(2 * LARGE, torch.float32).fill_(1)  # aligned: the disk takes the bytes from the tensor itself
changed, part, kept = empty(LARGE, torch.float32).fill_(1), whole[:LARGE], whole[LARGE:]
faulty, right = [], []
faulty.append((store.write("weight", changed), "'weight'", line()))
faulty.append((store.writev({"x": kept, "y": part}), "'y'", line()))
faulty.append((both.write("sharded", changed), "'sharded'", line()))
faulty.append((file.write(changed), "tensor 0", line()))
faulty.append((file.writev([kept, part], 1 << 22), "tensor 1", line()))
faulty.append((multipart.put(0, changed), "byte 0", line()))
freed = empty(LARGE, torch.float32).fill_(1)
plain = DiskStore("c", engine=engine, checksum=False)  # only the kernel reads the freed memory
faulty.append((plain.writev(tensors={"freed": freed}), "'freed'", line()))
right.append(store.write("kept", kept))
right.append(file.write(kept, 1 << 24))
changed.add_(1)
part.numpy()[5] = 7
freed.untyped_storage().resize_(0)
engine.release_held()
for future, name, where in faulty:
    expect(future, name, where)
assert [future.wait() for future in right] == [4 * LARGE] * 2
assert all(future.released.wait() is None for future in right)
for _ in range(50):  # a tensor may change as soon as it is released
    future = store.write("weight", changed)
    future.released.wait()
    changed.add_(1)
    future.wait()
assert store.write("bad", torch.ones(3), priority=-1).wait() == 12
for call, message in (
    (lambda: store.write("bad", [1.0]), "expected a torch.Tensor"),
    (lambda: store.write("bad"), "write() missing 1 required positional argument: 'tensor'"),
    (lambda: store.writev(None), "tensors is a mapping, {key: tensor}, not None"),
    (lambda: store.writev([changed]), "tensors is a mapping, {key: tensor}, not [tensor"),
):
    try:
        call()
        raise AssertionError
    except TypeError as error:
        assert message in str(error), error

@owns("named", lambda tensor, **_: {"the tensor": tensor})
def named(tensor, *, function, operation, tensors):
    return CUDAFuture.completed((function, operation, tensors))
assert named(torch.ones(3), function=1, operation=2, tensors=3).wait() == (1, 2, 3)

# ---- an optimizer whose buffers are parts of one memory
parameters = [torch.nn.Parameter(torch.ones(5000)) for _ in range(5)]
with offload(torch.optim.Adam(parameters), "states", min_bytes=0, swap_gradients=True) as optimizer:
    for _ in range(3):
        optimizer.zero_grad()
        sum(p.sum() for p in parameters).backward()
        optimizer.step()

# ---- copies, calls and collectives
held = CUDAFuture()

@rpc_ext.async_execution
def later(tensor):
    return held.then(lambda _: tensor)

rpc_ext.init_rpc("me", rank=0, world_size=1, init_method="file://" + os.path.abspath("place"))
owned, argument = torch.ones(3), torch.ones(3)
faulty = [(owns("later", lambda tensor: {"the tensor": tensor})(later)(owned), "the tensor", line())]
faulty.append((rpc_ext.rpc_async("me", later, (argument,)), "tensor 0", line()))
right = rpc_ext.rpc_async("me", later, (owned + 1,))
owned.mul_(2)
argument.mul_(2)
held.set_result(None)
for future, name, where in faulty:
    expect(future, name, where)
assert right.wait().tolist() == [2, 2, 2]
with rpc_ext.serve_store("served"), rpc_ext.RemoteStore("me") as remote:
    assert remote.write("w", argument).wait() == 12
    assert remote.writev(tensors={"w": argument}).wait() == 12
    for wrong in (None, [argument]):
        try:
            remote.writev(wrong)
            raise AssertionError
        except TypeError as error:
            assert "tensors is a mapping, {key: tensor}, not " in str(error), error
rpc_ext.shutdown()
source = torch.ones(3)
assert torch.equal(cudafuture.copy([source, source[:2]], "cpu").wait()[0], source)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
reduced = torch.ones(3)
assert cfd.all_reduce(reduced).then_async(lambda done: cfd.all_reduce(done.value())).wait() is reduced
for _ in range(50):  # a thread of gloo counts changes of the outputs
    assert cfd.all_gather([torch.zeros(3)], reduced).wait()[0].tolist() == [1, 1, 1]
print("checked")
"""


def test_early_tensor_change_fails_operation(tmp_path: Path) -> None:
    done = run_script(CHECKED, str(tmp_path), environment={**os.environ, "CUDAFUTURE_DEBUG": "ownership"})
    assert (done.returncode, done.stdout) == (0, "checked\n"), done.stderr
    assert "never retrieved" not in done.stderr


@pytest.mark.skipif(ENABLED, reason="the checks are on")
def test_disabled_checks_wrap_nothing() -> None:
    def function(tensor: torch.Tensor) -> None: ...

    assert owns("nothing", lambda tensor: {"the tensor": tensor})(function) is function
