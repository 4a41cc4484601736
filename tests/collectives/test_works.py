"""from_torch of c10d Works over Gloo, in two processes."""

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from cudafuture import CUDAFuture, gather, submit
from support.ranks import run_ranks

pytestmark = [pytest.mark.world, pytest.mark.slow]


def collectives(rank: int) -> None:
    thread = []
    tensor = torch.full((4,), float(rank + 1))
    future = CUDAFuture.from_torch(dist.all_reduce(tensor, async_op=True))
    child = future.then(lambda f: thread.append(threading.get_ident()) or f.value()[0] / 2)  # type: ignore[func-returns-value]
    assert child.wait(timeout=60).tolist() == [1.5] * 4
    assert isinstance(future.value(), list)
    assert future.value()[0].data_ptr() == tensor.data_ptr()
    assert future.value() is future.value()

    many = [torch.full((8,), float(i + rank)) for i in range(20)]
    whole = gather(*[CUDAFuture.from_torch(dist.all_reduce(t, async_op=True)) for t in many])
    assert [v[0][0].item() for v in whole.wait(timeout=60)] == [2 * i + 1 for i in range(20)]

    gathered = [torch.empty(2) for _ in range(2)]
    CUDAFuture.from_torch(dist.all_gather(gathered, torch.full((2,), float(rank)), async_op=True)).wait(timeout=60)
    assert [g.tolist() for g in gathered] == [[0, 0], [1, 1]]

    CUDAFuture.from_torch(dist.barrier(async_op=True)).wait(timeout=60)


def callbacks_run_on_the_callback_thread(rank: int) -> None:
    # Rank 1 holds its half back until rank 0 has attached its callback: the completion comes from Gloo's thread.
    if rank == 1:
        ready = torch.zeros(1)
        dist.recv(ready, 0)
    future = CUDAFuture.from_torch(dist.all_reduce(torch.ones(1), async_op=True))
    name = future.then(lambda _: threading.get_ident())
    if rank == 0:
        dist.send(torch.zeros(1), 1)
        assert name.wait(timeout=60) != threading.get_ident()
    future.wait(timeout=60)


def send_and_recv_without_a_future_of_their_own(rank: int) -> None:
    inbox = [torch.empty(2) for _ in range(10)]
    if rank == 0:
        futures = [CUDAFuture.from_torch(dist.irecv(t, 1, tag=i)) for i, t in enumerate(inbox)]  # type: ignore[arg-type]
        assert not any(f.done() for f in futures)
        dist.send(torch.zeros(1), 1, tag=100)
        gather(*futures).wait(timeout=60)
        assert [t[0].item() for t in inbox] == list(range(10))
    else:
        dist.recv(torch.empty(1), 0, tag=100)
        sends = [CUDAFuture.from_torch(dist.isend(torch.full((2,), float(i)), 0, tag=i)) for i in reversed(range(10))]  # type: ignore[arg-type]
        gather(*sends).wait(timeout=60)


def wait_for_a_dead_peer(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    future = CUDAFuture.from_torch(dist.all_reduce(torch.ones(1), async_op=True))
    error = future.exception(timeout=60)
    assert isinstance(error, RuntimeError), error
    assert submit(lambda: "alive").wait() == "alive"


def to_torch_serves_a_ddp_communication_hook(rank: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return CUDAFuture.from_torch(work).then(lambda f: f.value()[0] / 2).to_torch()

    model.register_comm_hook(None, hook)
    model(torch.full((1, 4), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5] * 4] * 2


@pytest.mark.parametrize(
    "program",
    [
        collectives,
        callbacks_run_on_the_callback_thread,
        send_and_recv_without_a_future_of_their_own,
        to_torch_serves_a_ddp_communication_hook,
    ],
    ids=lambda p: p.__name__,
)
def test_works_of_two_processes(program: Callable[[int], None]) -> None:
    run_ranks(2, program)


def test_dead_peer_fails_future_only() -> None:
    run_ranks(2, wait_for_a_dead_peer, lost=[1])
