"""Swapper with DeepSpeed's methods: it swaps parameters and their optimizer states in and out one by one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from cudafuture._arguments import expect_dtype, expect_int, expect_tensor, listed, shown
from cudafuture._C import CUDAFuture
from cudafuture._modes import outside_inference
from cudafuture.combine import wait_all
from cudafuture.compat.deepspeed._parameter_swapper import ParameterSwapper
from cudafuture.compat.deepspeed._partitions import assemble, partitions_of, staged
from cudafuture.compat.deepspeed.timers import StageTimers, Timers
from cudafuture.errors import InvalidStateError
from cudafuture.io import empty
from cudafuture.store import Store
from cudafuture.swap._checkpoints import Checkpoints
from cudafuture.swap._namespace import OptimizerNamespace
from cudafuture.swap._unit import places
from cudafuture.swap.statistics import SwapStatistics

__all__ = ["OptimizerSwapper"]


class OptimizerSwapper:
    """Parameters and states of an optimizer in a store; the program swaps each in for its update, and out again.

    It is for programs that run the update of each parameter themselves, as DeepSpeed's ZeRO does; its methods have the
    names of DeepSpeed's swappers. Other programs use ``offload()``.

    A parameter that is swapped out is empty, and so are the tensors of its state. While it is swapped in they are parts
    of one buffer. State that an optimizer creates later is swapped from then on. The parameters that follow are read
    ahead, in the order of the last round.

    Args:
        optimizer: its ``state`` has the states of the parameters; its groups need not have the parameters.
        store: a store, or a folder for an ephemeral one that the swapper closes.
        min_bytes: smaller tensors, and those with an attribute ``swappable`` that is False, stay in memory.
        buffer_bytes: of the buffers on the host. Default: enough for the parameters that are read ahead.
        prefetch: the number of parameters that are read ahead, and written behind.
        timers: started and stopped for each stage under its name.
        name: the prefix of the keys. Swappers that share a store need different names.

    Raises:
        ValueError: an argument is out of its range; the optimizer is LBFGS, which has one state for all parameters.

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> optimizer = torch.optim.Adam([weight])
    >>> swapper = OptimizerSwapper(optimizer, "states", min_bytes=0)
    >>> swapper.initialize_parameters([weight])
    >>> weight
    Parameter containing:
    tensor([], requires_grad=True)
    >>> swapper.swap_in_optimizer_state(weight)
    >>> weight.grad = torch.ones(4)
    >>> optimizer.step()
    >>> swapper.swap_out_optimizer_state(weight).wait()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Store | str | os.PathLike[str],
        *,
        min_bytes: int = 1 << 20,
        buffer_bytes: int | None = None,
        prefetch: int = 2,
        timers: Timers | None = None,
        name: str = "swapper",
    ) -> None:
        expect_int("min_bytes", min_bytes, 0)
        expect_int("prefetch", prefetch, 0)
        if buffer_bytes is not None:
            expect_int("buffer_bytes", buffer_bytes, 1)
        if timers is not None and not callable(timers):
            raise TypeError(f"timers is a function that returns a timer by name, not {shown(timers)}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a torch.optim.Optimizer, not {shown(optimizer)}")
        self._lock = threading.RLock()
        self._timers = StageTimers(timers)
        self._swapper: ParameterSwapper | None = None
        self._namespace = OptimizerNamespace(store, name)
        self._checkpoints = Checkpoints(self._namespace)
        try:
            self._swapper = ParameterSwapper(
                optimizer, self._namespace.store, self._namespace.state_prefix, min_bytes, buffer_bytes, prefetch
            )
        except BaseException:
            self.close()
            raise
        self.param_groups: list[dict[str, Any]] = [{"params": []}]

    @property
    def _swap(self) -> ParameterSwapper:
        if self._swapper is None:
            raise InvalidStateError("the swapper is closed")
        return self._swapper

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[ParameterSwapper]:
        """Hold the lock, and time a stage."""
        with self._lock, outside_inference(), torch.no_grad(), self._timers.time(name):
            yield self._swap

    # ---- registration

    def swappable(self, tensor_or_numel: torch.Tensor | int, dtype: torch.dtype = torch.float32) -> bool:
        """Return whether a tensor, or one with this number of elements and dtype, belongs in the store.

        >>> swapper = OptimizerSwapper(torch.optim.SGD([torch.ones(1)]), "states", min_bytes=4096)
        >>> swapper.swappable(1023), swapper.swappable(1024), swapper.swappable(torch.ones(1024))
        (False, True, True)
        """
        if isinstance(tensor_or_numel, torch.Tensor):
            return self._swap.is_swappable(tensor_or_numel)
        expect_dtype("dtype", dtype)
        numel = expect_int("tensor_or_numel", tensor_or_numel, 0)
        return self._swap.is_swappable(torch.empty(numel, dtype=dtype, device="meta"))

    def initialize_parameters(
        self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Register parameters, write their values, and empty them.

        Args:
            parameters: which are not registered yet. Those below `min_bytes` stay in memory.
            src_tensors: the values, one tensor of the same shape per parameter. Default: the parameters' own values.

        Raises:
            ValueError: a parameter is registered already; a parameter and its state need larger buffers (the message
                has the minimum); the number of tensors differs from the number of parameters.
            StorageError: a value cannot be written; then none of the parameters is registered.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> weight.tolist()
        []
        """
        given = _tensors("parameters", parameters)
        values = [p.detach() for p in given] if src_tensors is None else _tensors("src_tensors", src_tensors)
        if len(values) != len(given):
            raise ValueError(f"src_tensors has {len(values)} tensors for {len(given)} parameters")
        for i, (parameter, value) in enumerate(zip(given, values, strict=True)):
            if parameter.numel() and parameter.shape != value.shape:
                shapes = f"{list(value.shape)}, but the parameter {list(parameter.shape)}"
                raise ValueError(f"src_tensors[{i}] has the shape {shapes}")
        self._initialize(given, [value.shape for value in values], [values])

    def initialize_from_swapped_fp16_params(
        self,
        fp16_partitions_info: Sequence[Sequence[tuple[torch.Tensor | None, int, Any]]],
        fp16_num_elems: Sequence[int],
        fp16_pinned_buffers: Sequence[torch.Tensor] | None,
        fp32_parameters: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        """Register parameters, and assemble their float32 values from partitions of half precision.

        Partitions are read, cast and written in as many rounds as the buffers need.

        Args:
            fp16_partitions_info: the partitions of each parameter, in order. Each is a tensor, the number of its
                elements, and their place: None (in the tensor), a key of the store, or the path of a file that begins
                with them. A tensor without the elements only gives the dtype, and may be None.
            fp16_num_elems: the number of elements of each parameter.
            fp16_pinned_buffers: contiguous tensors that partitions are read into; those of one parameter go into one
                buffer. Partitions in memory need no buffer. Default: a new one.
            fp32_parameters: which are not registered yet.
            dtype: of the partitions in files without a tensor.

        Raises:
            ValueError: the arguments do not fit together, or no buffer has room for the partitions of a parameter.
            StorageError: a partition cannot be read, or a value written. Then none of the parameters is registered.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> here = [(torch.ones(2).half(), 2, None)]
        >>> swapper.initialize_from_swapped_fp16_params([here], [2], None, [weight])
        """
        fp32_parameters = _tensors("fp32_parameters", fp32_parameters)
        fp16_num_elems = [
            expect_int("each of fp16_num_elems", numel, 0) for numel in listed("fp16_num_elems", fp16_num_elems, "ints")
        ]
        fp16_partitions_info = listed("fp16_partitions_info", fp16_partitions_info, "lists of partitions")
        expect_dtype("dtype", dtype)
        if not len(fp16_partitions_info) == len(fp16_num_elems) == len(fp32_parameters):
            raise ValueError("the numbers of partition lists, element counts and parameters differ")
        parts = [
            partitions_of(infos, numel, dtype, self._namespace.store)
            for infos, numel in zip(fp16_partitions_info, fp16_num_elems, strict=True)
        ]
        if fp16_pinned_buffers is None:
            largest = max((places(staged(each))[-1] for each in parts), default=0)
            buffers = [empty(max(largest, 4096, min(self._swap.buffers.nbytes, 64 << 20)), torch.uint8)]
        else:
            pinned = _tensors("fp16_pinned_buffers", fp16_pinned_buffers)
            buffers = [buffer.detach().view(-1).view(torch.uint8) for buffer in pinned]
        shapes = [
            parameter.shape if parameter.numel() == numel else torch.Size([numel])
            for parameter, numel in zip(fp32_parameters, fp16_num_elems, strict=True)
        ]
        self._initialize(fp32_parameters, shapes, assemble(parts, self._namespace.store, buffers))

    def _initialize(
        self, parameters: Sequence[torch.Tensor], shapes: Sequence[torch.Size], rounds: Iterable[list[torch.Tensor]]
    ) -> None:
        """Register parameters, and write their values, which arrive in rounds."""
        with self._stage("swap_init_write") as swap:
            states = swap.register(parameters, shapes)
            left = iter(states)
            previous: list[CUDAFuture[int]] = []
            try:
                for values in rounds:
                    now = [(state, swap.write_first(state, value)) for value, state in zip(values, left, strict=False)]
                    wait_all(previous)
                    previous = [future for _, future in now if future is not None]
                wait_all(previous)
            except BaseException:
                swap.unregister(states)
                raise
            for state in states:
                swap.empty(state)
            self.param_groups[0]["params"] += parameters

    # ---- state

    def swap_in_optimizer_state(self, parameter: torch.Tensor, async_parameter: torch.Tensor | None = None) -> None:
        """Read a parameter, its state and its gradient, and bind them to memory. Unknown parameters are ignored.

        The parameter's ``data`` and that of the tensors in ``optimizer.state[parameter]`` are valid until it is swapped
        out; views of them that a program keeps longer hold the buffer's memory.

        Args:
            parameter: a registered parameter.
            async_parameter: the next parameter that the program will swap in. Default: the next one of the last round.

        Raises:
            SwapError: something cannot be read, and nothing is bound; or an earlier write has failed, whose tensors are
                in memory. Call again.
            InvalidStateError: the parameter is swapped in.
            ValueError: the buffers have no room beside the parameters that are swapped in.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.swap_in_optimizer_state(weight)
        >>> weight.tolist()
        [1.0, 1.0]
        """
        with self._stage("swap_in_state") as swap:
            state = swap.find(parameter)
            if state is not None:
                following = None if async_parameter is None else swap.find(async_parameter)
                swap.swap_in(state, following)

    def swap_out_optimizer_state(self, parameter: torch.Tensor, async_swap: bool = True) -> CUDAFuture[None]:
        """Write a parameter and its state, empty them, and drop the gradient.

        Args:
            parameter: a parameter that is swapped in. Unknown parameters are ignored.
            async_swap: return before the writes have ended. If it is False, the future is done on return.

        Returns:
            a future that completes when all is written. State that cannot be written fails it with SwapError, and stays
            in memory until the parameter is swapped out again; the next call that swaps in raises the error too.

        Raises:
            InvalidStateError: the parameter is not swapped in.
            SwapError: with ``async_swap=False``, something cannot be written.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.swap_in_optimizer_state(weight)
        >>> swapper.swap_out_optimizer_state(weight).wait()
        """
        with self._stage("swap_out_state") as swap:
            state = swap.find(parameter)
            if state is None:
                return CUDAFuture.completed(None)
            written = swap.swap_out(state)
            swap.pipeline.forget_gradient(state)
        if not async_swap:
            with self._stage("async_swap_out_state") as swap:
                swap.flush()
        return written

    def release_swap_buffers(self, parameter: torch.Tensor) -> None:
        """Empty a parameter that is swapped in without writing it. Other parameters are ignored.

        Values that stay in memory, such as the number of steps, keep the result of the update.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.swap_in_optimizer_state(weight)
        >>> swapper.release_swap_buffers(weight)
        >>> weight.tolist()
        []
        """
        with self._lock:
            state = self._swap.find(parameter)
            if state is not None and self._swap.is_bound(state):
                self._swap.release(state)

    def writeback_optimizer_state_and_gradients(
        self, parameter: torch.Tensor, write_opt_state: bool, write_gradients: bool
    ) -> None:
        """Swap a parameter out, and write or drop the changes of its state and of its gradient.

        Raises:
            InvalidStateError: the parameter is not swapped in.
            SwapError: something cannot be written; it stays in memory.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.swap_in_optimizer_state(weight)
        >>> swapper.writeback_optimizer_state_and_gradients(weight, True, False)
        """
        with self._stage("swap_out_state") as swap:
            state = swap.find(parameter)
            if state is None:
                return
            if write_gradients:
                swap.write_back_gradients(state)
            if write_opt_state:
                swap.swap_out(state)
                swap.flush()
            else:
                swap.release(state)
            swap.flush_gradients()

    def purge_state(self) -> None:
        """Delete the states and gradients of all parameters, but not their values.

        Raises:
            InvalidStateError: a parameter is swapped in.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.purge_state()
        """
        with self._lock:
            self._swap.pipeline.drop_reads()
            states = [self._swap.state(parameter) for parameter in self._swap.parameters]
            for state in states:
                self._swap.purge(state)

    # ---- gradients

    def swap_out_gradients(
        self, parameter: torch.Tensor, gradient_offsets: Sequence[int], gradient_tensors: Sequence[torch.Tensor]
    ) -> CUDAFuture[None]:
        """Store pieces of a parameter's gradient until the parameter is swapped in. Unknown parameters are ignored.

        Pieces of at least `min_bytes` go to the store, others stay in memory; both are copies. A piece replaces the one
        that begins at the same element. Elements outside of the pieces are zero.

        Args:
            parameter: a registered parameter.
            gradient_offsets: the first element of each piece in the flat gradient, in any order.
            gradient_tensors: the pieces.

        Returns:
            a future that completes when all pieces are written, and fails with SwapError if one cannot be written; that
            piece stays in memory.

        Raises:
            ValueError: a piece lies outside the parameter, or overlaps another one.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.swap_out_gradients(weight, [1], [torch.ones(1)]).wait()
        >>> swapper.swap_in_optimizer_state(weight)
        >>> weight.grad
        tensor([0., 1.])
        """
        offsets = listed("gradient_offsets", gradient_offsets, "ints")
        pieces = listed("gradient_tensors", gradient_tensors, "tensors")
        if len(offsets) != len(pieces):
            raise ValueError(f"gradient_offsets has {len(offsets)} offsets for {len(pieces)} pieces")
        for offset, piece in zip(offsets, pieces, strict=True):
            expect_int("each of gradient_offsets", offset)
            expect_tensor("each of gradient_tensors", piece)
        with self._stage("swap_out_gradient") as swap:
            state = swap.find(parameter)
            if state is None:
                return CUDAFuture.completed(None)
            return swap.write_gradients(state, offsets, pieces)

    def flush_gradients(self) -> None:
        """Wait until all pieces of gradients are written, and the futures of ``swap_out_gradients`` are done.

        Raises:
            SwapError: a piece cannot be written; it stays in memory, and is not lost.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.flush_gradients()
        """
        with self._stage("async_swap_gradient_wait") as swap:
            swap.flush_gradients()

    # ---- checkpoints

    def save(self, checkpoint: str) -> None:
        """Save the values and states of all parameters, and the options in ``param_groups``, under a name in the store.

        In a ``DiskStore`` a checkpoint links to the tensors without copying them, because later swaps write new ones.
        Other stores copy. A checkpoint of the same name is replaced when the new one is complete.

        Raises:
            InvalidStateError: a parameter is swapped in.
            SwapError: something that was swapped out cannot be written.
            StorageError: the checkpoint cannot be written; an older one of the name does not change.
            TypeError: the name, an option or a value of a state has a type ``load()`` cannot read; nothing is written.
            ValueError: the name is empty, or has a "/".

        >>> from cudafuture.store import DiskStore
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), DiskStore("states", durable=True), min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.save("epoch 1")
        >>> swapper.checkpoints()
        ['epoch 1']
        """
        with self._lock, outside_inference(), torch.no_grad():
            self._checkpoints.save(checkpoint, self.param_groups, self._swap)

    def load(self, checkpoint: str) -> None:
        """Restore the values and states of a checkpoint. The same parameters must be registered, and swapped out.

        Raises:
            InvalidStateError: a parameter is swapped in.
            NotFoundError: the checkpoint does not exist, or one of its tensors is missing; nothing has changed.
            ValueError: the shapes of its parameters, or its optimizer's class, differ from this one's.
            StorageError: a tensor cannot be read. Some parameters have the values and states of the checkpoint, the
                others have not changed: load it again, or load another one.

        >>> from cudafuture.store import DiskStore
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), DiskStore("states", durable=True), min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.save("epoch 1")
        >>> swapper.load("epoch 1")
        """
        with self._lock, outside_inference(), torch.no_grad():
            self._swap.pipeline.drop_reads()
            self._checkpoints.load(checkpoint, self.param_groups, self._swap)

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the store, sorted.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.checkpoints()
        []
        """
        return self._checkpoints.names()

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Delete a checkpoint.

        Raises:
            NotFoundError: the checkpoint does not exist.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.save("epoch 1")
        >>> swapper.delete_checkpoint("epoch 1")
        """
        with self._lock:
            self._checkpoints.delete(checkpoint)

    # ---- timers, statistics and shutdown

    def init_timers(self) -> None:
        """Clear the names of the timers that were used.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.init_timers()
        """
        self._timers.clear()

    def log_timers(self) -> None:
        """Log the timers that were used since ``init_timers()``.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.log_timers()
        """
        self._timers.log()

    def pre_backward(self) -> None:
        """Begin an iteration: clear the names of the timers that were used.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.pre_backward()
        """
        self.init_timers()

    def post_backward(self) -> None:
        """Wait until the gradients of this backward are written.

        Raises:
            SwapError: a piece cannot be written; it stays in memory.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.post_backward()
        """
        self.flush_gradients()

    def statistics(self) -> SwapStatistics:
        """Return counts and times since the swapper was created.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.statistics().stored_bytes
        8
        """
        with self._lock:
            return self._swap.pipeline.counters.statistics(self._swap.stored_bytes, 0)

    def close(self) -> None:
        """Wait for operations in flight, and delete everything from the store, except checkpoints.

        A store that the swapper created is closed. Parameters that are swapped out stay empty: swap in, or save, the
        ones that you need before. Further calls do nothing.

        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> swapper.close()
        """
        with self._lock:
            swapper, self._swapper = self._swapper, None
            try:
                if swapper is not None:
                    swapper.close()
            finally:
                self._namespace.close()

    def __enter__(self) -> OptimizerSwapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensors(name: str, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a list of tensors that was passed as an argument."""
    tensors = listed(name, given, "tensors")
    for tensor in tensors:
        expect_tensor(f"each of {name}", tensor)
    return tensors
