"""Tests of the library in the place of NCCL through torch.distributed, with a process for each rank."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from fakecuda.nccl_ranks import end_of_ranks, needs_fake_runtime, run_ranks
from support.patience import PATIENCE

pytestmark = [pytest.mark.cuda, pytest.mark.world, needs_fake_runtime]

SCHEDULES = ["lazy", "jitter"]
WORLDS = [2, 4]

REDUCTIONS = """
    import itertools, math
    start()
    values = [[(r * 3 + i) % 5 + 1 for i in range(7)] for r in range(world)]
    columns = list(zip(*values))
    R = dist.ReduceOp
    expected = {R.SUM: [sum(c) for c in columns], R.PRODUCT: [math.prod(c) for c in columns],
                R.MIN: [min(c) for c in columns], R.MAX: [max(c) for c in columns]}
    types = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
             torch.float64]
    for dtype, op in itertools.product(types, expected):
        x = torch.tensor(values[rank], dtype=dtype, device=device)
        dist.all_reduce(x, op)
        wrapped = torch.tensor(expected[op]).to(dtype)
        equal(x, wrapped)
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = torch.tensor(values[rank], dtype=dtype, device=device)
        dist.all_reduce(x, R.AVG)
        equal(x, torch.tensor(expected[R.SUM], dtype=dtype) / world)  # exact: the number of ranks is a power of two
        x = torch.tensor(values[rank], dtype=dtype, device=device)
        dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
        equal(x, torch.tensor(expected[R.SUM], dtype=dtype) * 2)
    x = torch.tensor(values[rank], dtype=torch.float32, device=device)
    dist.all_reduce(x, dist._make_nccl_premul_sum(torch.tensor([3.0], device=device)))
    equal(x, [3 * v for v in expected[R.SUM]])
    x = torch.tensor(values[rank], dtype=torch.int32, device=device)
    dist.all_reduce(x, R.AVG)
    equal(x, [v // world for v in expected[R.SUM]])
    x = torch.tensor([rank == 0, False, True], device=device)
    dist.all_reduce(x)
    equal(x, [True, False, True])
    x = torch.tensor([complex(rank, 1)], device=device)
    dist.all_reduce(x)
    equal(x, [complex(sum(range(world)), world)])
    dist.destroy_process_group()
"""

COLLECTIVES = """
    start()
    total = sum(range(1, world + 1))
    for size in (0, 1, 300_000):
        x = torch.full((size,), float(rank + 1), device=device)
        dist.all_reduce(x)
        equal(x, torch.full((size,), float(total)))
        dist.broadcast(x, 1)
        y = torch.full((size,), float(rank + 1), device=device)
        dist.broadcast(y, world - 1)
        equal(y, torch.full((size,), float(world)))
        y = torch.full((size,), float(rank + 1), device=device)
        dist.reduce(y, 1)
        if rank == 1:
            equal(y, torch.full((size,), float(total)))
        out = torch.empty(world * size, device=device)
        dist.all_gather_into_tensor(out, torch.full((size,), float(rank), device=device))
        equal(out, torch.arange(world, dtype=torch.float).repeat_interleave(size))
        out = torch.empty(size, device=device)
        blocks = torch.arange(world, dtype=torch.float, device=device).repeat_interleave(size) + rank
        dist.reduce_scatter_tensor(out, blocks)
        equal(out, torch.full((size,), float(world * rank + total - world)))
        out = torch.empty(world * size, device=device)
        dist.all_to_all_single(out, blocks * 10 - 9 * rank)
        equal(out, (torch.arange(world, dtype=torch.float) + 10 * rank).repeat_interleave(size))
    whole = torch.zeros(world * 3, device=device)
    whole[rank * 3:(rank + 1) * 3] = rank
    dist.all_gather_into_tensor(whole, whole[rank * 3:(rank + 1) * 3])
    equal(whole, torch.arange(world).repeat_interleave(3))
    outs = [torch.empty(2 + r, device=device) for r in range(world)]
    dist.all_gather(outs, torch.full((2 + rank,), float(rank), device=device))
    for r, out in enumerate(outs):
        equal(out, torch.full((2 + r,), float(r)))
    out = torch.empty(2, device=device)
    dist.reduce_scatter(out, [torch.full((2,), float(r), device=device) for r in range(world)])
    equal(out, [float(rank * world)] * 2)
    outs = [torch.empty(2, device=device) for _ in range(world)]
    dist.all_to_all(outs, [torch.full((2,), float(10 * rank + r), device=device) for r in range(world)])
    equal(torch.stack(outs)[:, 0], [10.0 * r + rank for r in range(world)])
    # Rank r sends r + 1 elements to each rank.
    out = torch.empty(sum(range(1, world + 1)), device=device)
    dist.all_to_all_single(out, torch.full(((rank + 1) * world,), float(rank), device=device),
                           [r + 1 for r in range(world)], [rank + 1] * world)
    equal(out, [float(r) for r in range(world) for _ in range(r + 1)])
    gathered = [torch.empty(2, device=device) for _ in range(world)] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank), device=device), gathered, 1)
    if rank == 1:
        equal(torch.stack(gathered)[:, 0], torch.arange(world))
    out = torch.empty(2, device=device)
    dist.scatter(out, [torch.full((2,), float(r), device=device) for r in range(world)] if rank == 0 else None, 0)
    equal(out, [float(rank)] * 2)
    many = [torch.full((3,), float(rank + i), device=device) for i in range(5)]
    with dist._coalescing_manager(device=device):
        for each in many:
            dist.all_reduce(each)
    for i, each in enumerate(many):
        equal(each, [float(sum(range(world)) + world * i)] * 3)
    narrow = torch.full((4,), rank + 1.5, device=device).to(torch.float8_e4m3fn)
    out = torch.empty(4 * world, dtype=torch.float8_e4m3fn, device=device)
    dist.all_gather_into_tensor(out, narrow)
    equal(out.view(torch.uint8), torch.cat([torch.full((4,), r + 1.5) for r in range(world)]).to(torch.float8_e4m3fn)
          .view(torch.uint8))
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()
"""

MESSAGES = """
    start()
    after, before = (rank + 1) % world, (rank - 1) % world
    for size in (1, 100_000):
        x = torch.full((size,), float(rank), device=device)
        y = torch.empty(size, device=device)
        if rank % 2 == 0:
            dist.send(x, after)
            dist.recv(y, before)
        else:
            dist.recv(y, before)
            dist.send(x, after)
        equal(y, torch.full((size,), float(before)))
        # All ranks send before they receive, in one group.
        z = torch.empty(size, device=device)
        own = torch.empty(size, device=device)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, z, before)])
        for work in works:
            work.wait()
        equal(z, torch.full((size,), float(before)))
    # Two messages of one pair arrive in their order.
    a, b = torch.empty(2, device=device), torch.empty(3, device=device)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((2,), 1.0, device=device), after),
        dist.P2POp(dist.isend, torch.full((3,), 2.0, device=device), after),
        dist.P2POp(dist.irecv, a, before), dist.P2POp(dist.irecv, b, before)])
    for work in works:
        work.wait()
    equal(a, [1.0] * 2)
    equal(b, [2.0] * 3)
    dist.destroy_process_group()
"""

GROUPS = """
    start(device_id=device)  # new groups are made by ncclCommSplit
    x = torch.full((2,), float(rank), device=device)
    dist.all_reduce(x)
    members = [r for r in range(world) if r % 2 == rank % 2]
    groups = [dist.new_group([r for r in range(world) if r % 2 == part]) for part in (0, 1)]
    y = torch.full((2,), float(rank), device=device)
    dist.all_reduce(y, group=groups[rank % 2])
    equal(y, [float(sum(members))] * 2)
    pair = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        y = torch.full((2,), 1.0, device=device)
        dist.all_reduce(y, group=pair)
        equal(y, [2.0] * 2)
    dist.barrier()
    dist.destroy_process_group()
"""

TRAINING = """
    torch.manual_seed(0)
    start(device_id=device)
    host = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    import copy
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(host).to(device), device_ids=[rank])
    data = torch.randn(world, 6, 4)
    for module, batch in ((model, data[rank].to(device)), (host, data.reshape(-1, 4))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(batch).pow(2).mean().backward()
            optimizer.step()
    for ours, theirs in zip(model.module.parameters(), host.parameters()):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("program", [REDUCTIONS, COLLECTIVES, MESSAGES], ids=["reductions", "collectives", "messages"])
def test_values_are_right(program: str, world: int, schedule: str, tmp_path: Path) -> None:
    run_ranks(program, world, tmp_path, FAKECUDA_SCHEDULE=schedule)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("program", [GROUPS, TRAINING], ids=["groups", "training"])
def test_groups_and_training_give_right_values(program: str, blocking: bool, tmp_path: Path) -> None:
    run_ranks(program, 4, tmp_path, TORCH_NCCL_USE_COMM_NONBLOCKING="0" if blocking else "1")


def test_captured_collective_runs_with_each_replay(tmp_path: Path) -> None:
    program = """
    start(device_id=device)
    x = torch.full((3,), 1.0, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    equal(x, [2.0] * 3)
    for _ in range(3):
        graph.replay()
    dist.all_reduce(x)
    graph.replay()
    equal(x, [64.0] * 3)
    dist.destroy_process_group()
    """
    run_ranks(program, 2, tmp_path)


def test_aborted_collective_releases_its_stream(tmp_path: Path) -> None:
    program = """
    start(device_id=device)
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 0:
        x = torch.ones(3, device=device)
        work = dist.all_reduce(x, async_op=True)
        dist.group.WORLD.abort()
        torch.cuda.synchronize()
        print("released")
    """
    outputs = run_ranks(program, 2, tmp_path, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    assert "released" in outputs[0]


def test_killed_rank_is_asynchronous_error(tmp_path: Path) -> None:
    program = """
    start(device_id=device)
    x = torch.ones(3, device=device)
    dist.all_reduce(x)
    equal(x, [2.0] * 3)
    if rank == 1:
        os.kill(os.getpid(), 9)
    work = dist.all_reduce(x, async_op=True)
    try:
        while not work.is_completed():
            pass
        work.wait()
        print("no error")
    except dist.DistBackendError as error:
        print(error)
    os._exit(0)
    """
    before = set(Path("/dev/shm").iterdir())
    survivor, killed = end_of_ranks(program, 2, tmp_path, TORCH_NCCL_ASYNC_ERROR_HANDLING="2")
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 0, survivor.output
    assert "remote process exited" in survivor.output
    assert f"Rank 1 (process {killed.pid}) has died." in survivor.output
    deadline = time.monotonic() + PATIENCE
    while {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("fakenccl")}:
        assert time.monotonic() < deadline  # ranks of other tests have a segment until all of them have joined


def test_mismatched_collectives_name_both_ranks(tmp_path: Path) -> None:
    program = """
    start(device_id=device)
    x = torch.ones(3 + rank, device=device)
    work = dist.all_reduce(x, async_op=True)
    try:
        while not work.is_completed():
            pass
        work.wait()
        print("no error")
    except dist.DistBackendError as error:
        print(error)
    sys.stdout.flush()
    # The other rank has to see the difference too before this one ends.
    open(f"{path}-{rank}", "w").close()
    while not os.path.exists(f"{path}-{1 - rank}"):
        time.sleep(0.01)
    os._exit(0)
    """
    for output in run_ranks(program, 2, tmp_path, TORCH_NCCL_ASYNC_ERROR_HANDLING="2"):
        assert "rank 0 called AllReduce(count=3, type=float32, reduction=sum)" in output
        assert "but rank 1 called AllReduce(count=4, type=float32, reduction=sum)" in output
        assert "no error" not in output
