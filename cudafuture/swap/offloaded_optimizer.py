"""Optimizer of torch whose state is in a store, on a disk or on another worker."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch

from cudafuture import openmetrics
from cudafuture._arguments import expect_number
from cudafuture._modes import outside_inference
from cudafuture.errors import InvalidStateError, SwapError
from cudafuture.store import DiskStore, Store
from cudafuture.swap._checkpoints import Checkpoints
from cudafuture.swap._given_optimizer import take
from cudafuture.swap._gradients import AppliedGradient, GradientMark
from cudafuture.swap._namespace import OptimizerNamespace
from cudafuture.swap._parameter_groups import GroupIndex, UpdateOrder, name_of, parameters_of
from cudafuture.swap._state_layout import SwapOptions
from cudafuture.swap._state_mapping import StateMapping
from cudafuture.swap._swapper import Swapper
from cudafuture.swap._update import Update
from cudafuture.swap.statistics import SwapCounters, SwapStatistics

__all__ = ["OffloadedOptimizer"]

_logger = logging.getLogger("cudafuture.swap")


class OffloadedOptimizer(torch.optim.Optimizer):
    """``torch.optim.Optimizer`` whose state is in a store; ``offload()`` creates it.

    ``state`` is a mapping from parameters to their states, as usual; each lookup reads the state from the store.
    ``state_of`` and ``set_state`` do the same by method calls.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        make: Callable[[list[Any]], torch.optim.Optimizer] | None,
        store: Store | str | os.PathLike[str],
        name: str,
        when: Literal["step", "backward"],
        options: SwapOptions,
    ) -> None:
        if when not in ("step", "backward"):
            raise ValueError(f"when={when!r} is neither 'step' nor 'backward'")
        if options.swap_gradients and when == "backward":
            raise ValueError("swap_gradients is for when='step'; when='backward' uses each gradient at once")
        update = Update(optimizer)
        self._make, self._when, self._swaps_gradients = make, when, options.swap_gradients
        self._until_now, self._last_step = SwapCounters(), SwapCounters()  # at the last step's end; of that step
        self._index = GroupIndex()
        self._lock = threading.RLock()  # backward runs in one thread per device
        self._order = UpdateOrder(options.prefetch)
        self._swapper: Swapper | None = None
        self._failed_update: SwapError | ValueError | None = None  # of this backward's updates
        self._has_told = False  # that checkpoints in an ephemeral store end with it
        self._is_made = False  # torch's constructor adds the groups before there is a swapper
        given_state = dict(optimizer.state)
        super().__init__([dict(group) for group in groups], dict(optimizer.defaults))
        self.state = StateMapping(self)  # type: ignore[assignment]
        self._namespace = OptimizerNamespace(store, name)
        self._checkpoints = Checkpoints(self._namespace)
        try:
            parameters = list(self._parameters())
            this = weakref.ref(self)  # so that an optimizer that the program drops, and its hooks, are freed at once

            def find_name(parameter: torch.Tensor) -> str:
                optimizer = this()
                return "a parameter" if optimizer is None else name_of(optimizer.param_groups, parameter)

            self._swapper = Swapper(
                self._namespace.store, self._namespace.state_prefix, update, options, parameters, find_name
            )
            for parameter, state in given_state.items():
                if state and parameter.numel():
                    self.set_state(parameter, state)
            optimizer.state.clear()
            take(optimizer, self.param_groups)  # after `update` has copied it
            for parameter, group in self._parameters():
                self._make_state(parameter, group)
        except BaseException:
            self.close()
            raise
        self._is_made = True
        openmetrics.add(self, "swap", optimizer=type(self).__name__)

    @property
    def _swap(self) -> Swapper:
        if self._swapper is None:
            raise InvalidStateError("the offloaded optimizer is closed")
        return self._swapper

    def _make_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if self._make is not None:
            self._swap.make_state(parameter, group, self._make)

    def _parameters(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        return parameters_of(self.param_groups)

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; return the closure's loss, or None.

        After an error the step can be repeated: it updates the remaining parameters. Updated parameters are skipped if
        their gradient is the same tensor, and its values have not changed since. After a step without an error another
        step uses the same gradients again, as in torch, but not with ``when="backward"`` or ``swap_gradients=True``:
        these drop a gradient when it has been used.

        Raises:
            SwapError: the state of a parameter cannot be read or written. Each parameter has its old value and its old
                state, or its new ones. State that cannot be written stays in memory until a later step has written it.
            RuntimeError: a gradient is sparse.
            InvalidStateError: the optimizer is closed.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9990, 0.9990, 0.9990])
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock, outside_inference(), torch.no_grad():
            swap, counters = self._swap, self._swap.pipeline.counters
            counters.steps += 1
            failed, self._failed_update = self._failed_update, None
            try:
                due = [parameter for parameter, _ in self._parameters() if self._is_due(parameter)]
                if failed is not None:
                    raise failed
                if self._when == "backward":
                    self._end_backward(due)
                else:
                    swap.update(due, partial(self._index.group_of, self.param_groups), once=self._swaps_gradients)
                if self._when == "step" and not self._swaps_gradients:
                    for parameter, _ in self._parameters():
                        swap.state(parameter).applied = None
            finally:
                self._last_step, self._until_now = counters.since(self._until_now), replace(counters)
        return loss

    def _is_due(self, parameter: torch.Tensor) -> bool:
        if self._swaps_gradients and self._swap.has_swapped_gradient(parameter):
            return True
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, GradientMark):
            return False
        if gradient.is_sparse:
            raise RuntimeError(
                f"the gradient of {name_of(self.param_groups, parameter)} is sparse, but its state is read as a whole: "
                "make the layer with sparse=False, or give its parameters to another optimizer"
            )
        return not self._swap.state(parameter).has_applied(gradient)

    # ---- hooks of backward

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Move a complete gradient to the store, or update its parameter and read the state of the next ones."""
        with self._lock, outside_inference(), torch.no_grad():
            if self._swaps_gradients:
                self._swap.write_gradient(parameter)
                return
            group = self._index.find(self.param_groups, parameter)
            if group is None or not self._is_due(parameter):
                return
            self._order.begin_update(parameter)
            try:
                self._swap.update_now(parameter, group)
            except (SwapError, ValueError) as e:  # raising it here would leave other parameters without gradients
                self._failed_update = self._failed_update or e
                return
            parameter.grad = AppliedGradient(parameter)
            self._start_reads()

    def _forget_reads(self) -> None:
        """Stop reading ahead in this backward; the next call that reads drops the reads in flight."""
        self._order.stop_reads()

    def _start_reads(self) -> None:
        for parameter in self._order.next_reads():
            try:
                self._swap.start_read(parameter)
            except ValueError:  # the buffers have no room for it; its update raises the error
                self._forget_reads()

    def _end_backward(self, left: list[torch.Tensor]) -> None:
        """Update parameters that the hooks have not, and read ahead for the next backward; leave writes in flight."""
        if left:
            self._swap.update(left, partial(self._index.group_of, self.param_groups), once=True)
        self._order.end()
        self._swap.pipeline.drop_reads()
        self._start_reads()
        self._swap.pipeline.reap()

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as with every optimizer of torch.

        Raises:
            ValueError: one of them needs larger buffers than the optimizer has.
            SwapError: state that the optimizer allocates on creation cannot be written. No parameter is added.
            InvalidStateError: the optimizer is closed.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.1})
        """
        swapper = self._swap if self._is_made else None
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        added = [(parameter, group) for parameter in group["params"]]
        if swapper is not None:
            with self._lock:
                try:
                    swapper.expect_room(added)
                    for parameter, _ in added:
                        self._make_state(parameter, group)
                except BaseException:
                    self.param_groups.pop()
                    for parameter, _ in added:
                        swapper.discard_state(parameter)
                    raise
        if self._when == "backward" or self._swaps_gradients:
            this = weakref.ref(self)

            def hook(parameter: torch.Tensor) -> None:
                optimizer = this()
                if optimizer is not None and optimizer._swapper is not None:
                    optimizer._on_gradient(parameter)

            for parameter, _ in added:
                if parameter.requires_grad:
                    weakref.finalize(self, parameter.register_post_accumulate_grad_hook(hook).remove)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or clear the gradients, as every optimizer of torch does.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> weight.sum().backward()
        >>> optimizer.zero_grad()
        >>> weight.grad is None
        True
        """
        self._drop_marks()
        super().zero_grad(set_to_none)

    def _drop_marks(self) -> None:
        for parameter, _ in self._parameters():
            if isinstance(parameter.grad, GradientMark):
                parameter.grad = None
                if self._swapper is not None:
                    self._swapper.pipeline.forget_gradient(self._swapper.state(parameter))

    # ---- gradients

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of a parameter, from the store if it is there; None if there is none.

        Raises:
            SwapError: the gradient cannot be read.
            RuntimeError: a step has already applied the gradient.
            KeyError: the optimizer does not have this parameter.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states", swap_gradients=True, min_bytes=0)
        >>> weight.sum().backward()
        >>> optimizer.gradient_of(weight)
        tensor([1., 1., 1.])
        """
        self._index.group_of(self.param_groups, parameter)
        with self._lock, outside_inference(), torch.no_grad():
            return self._swap.gradient_of(parameter)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

        The result equals that of ``torch.nn.utils.clip_grad_norm_`` bit for bit, for gradients in the store and in
        memory. Gradients in the store are read once for the norm; the step applies the factor when it reads them.

        Args:
            max_norm: of all gradients together, as one vector.
            norm_type: of the norm; ``math.inf`` for the largest element.
            error_if_nonfinite: raise if the norm is infinite or not a number.

        Raises:
            SwapError: a gradient cannot be read.
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is True.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states", swap_gradients=True, min_bytes=0)
        >>> weight.sum().backward()
        >>> optimizer.clip_grad_norm_(1.0)
        tensor(2.)
        >>> optimizer.gradient_of(weight)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        for name, number in (("max_norm", max_norm), ("norm_type", norm_type)):
            expect_number(name, number)
        with self._lock, outside_inference(), torch.no_grad():
            clipped: list[torch.Tensor] = []
            norms: list[torch.Tensor] = []
            for parameter, gradient in self._gradients():
                clipped.append(parameter)
                norms.append(torch.linalg.vector_norm(gradient, norm_type))
            if not norms:
                return torch.tensor(0.0, dtype=torch.float32, device="cpu")
            total: torch.Tensor = torch.linalg.vector_norm(
                torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
            )
            if error_if_nonfinite and not total.isfinite():
                raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}")
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            for parameter in clipped:
                self._swap.multiply_gradient(parameter, factor)
            return total

    def unscale_(self, scale: float | torch.Tensor) -> bool:
        """Divide all gradients by a loss scale; return whether they are all finite.

        It replaces ``GradScaler.unscale_`` if gradients are in the store. If it returns False, skip the step, call
        ``zero_grad()``, and use a smaller scale.

        Args:
            scale: the factor of the loss.

        Raises:
            SwapError: a gradient cannot be read.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states", swap_gradients=True, min_bytes=0)
        >>> (weight.sum() * 8).backward()
        >>> optimizer.unscale_(8)
        True
        >>> optimizer.gradient_of(weight)
        tensor([1., 1.])
        """
        expect_number("scale", scale)
        with self._lock, outside_inference(), torch.no_grad():
            device = scale.device if isinstance(scale, torch.Tensor) else "cpu"
            inverse = torch.as_tensor(scale, dtype=torch.float64, device=device).reciprocal().float()
            finite = True
            unscaled: list[torch.Tensor] = []
            for parameter, gradient in self._gradients():
                unscaled.append(parameter)
                finite = finite and bool(gradient.isfinite().all())
            for parameter in unscaled:
                self._swap.multiply_gradient(parameter, inverse)
            return finite

    def _gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters that have gradients, with copies of those; two copies exist at a time."""
        for parameter, _ in self._parameters():
            gradient = self._swap.gradient_of(parameter)
            if gradient is not None:
                yield parameter, gradient

    # ---- the state

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a copy of the state of a parameter; an empty dictionary if it was never updated.

        Raises:
            SwapError: the state cannot be read.
            KeyError: the optimizer does not have this parameter.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> optimizer.state_of(weight)
        {}
        """
        return self._read_state(parameter, mapped=False)

    def _read_state(self, parameter: torch.Tensor, mapped: bool) -> dict[str, Any]:
        self._index.group_of(self.param_groups, parameter)
        with self._lock, outside_inference(), torch.no_grad():
            self._forget_reads()
            return self._swap.read_state(parameter, mapped)

    def set_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of a parameter.

        Raises:
            ValueError: a tensor has another shape than the parameter, and the optimizer is element-wise.
            SwapError: the state cannot be written.
            KeyError: the optimizer does not have this parameter.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
        >>> optimizer.set_state(weight, state)
        >>> optimizer.state_of(weight)["step"]
        tensor(1.)
        """
        self._index.group_of(self.param_groups, parameter)
        with self._lock, outside_inference(), torch.no_grad():
            self._forget_reads()
            self._swap.write_state(parameter, state)

    def __getstate__(self) -> NoReturn:
        raise TypeError("this optimizer cannot be pickled, its state is in a store: use state_dict() or save()")

    def __setstate__(self, state: dict[str, Any]) -> None:  # load_state_dict calls this at its end
        saved = self._swap.completed(state)
        for parameter, values in saved["state"].items():
            self._swap.layout.expect_shape(self._swap.state(parameter), values)
        for group in saved["param_groups"]:
            for parameter in group["params"]:
                self.set_state(parameter, saved["state"].get(parameter, {}))
        self.param_groups[:] = saved["param_groups"]  # the optimizer that was given to offload() has the list, too

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups and the state of an optimizer of the same kind, offloaded or not.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> plain = torch.optim.Adam([weight])
        >>> optimizer.load_state_dict(plain.state_dict())
        """
        if not self._swap.has_masters:
            super().load_state_dict(state_dict)
            return
        super().load_state_dict({**state_dict, "state": {}})  # torch would round float32 to the parameter's dtype
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        states = {
            parameter: state_dict["state"].get(number, {})
            for number, (parameter, _) in zip(numbers, self._parameters(), strict=True)
        }
        self.__setstate__({"state": states, "param_groups": self.param_groups})

    # ---- checkpoints

    def save(self, checkpoint: str) -> None:
        """Save the state of all parameters, and the options of their groups, under a name in the store.

        In a ``DiskStore`` a checkpoint links to the tensors without copying them, because later steps write new ones.
        Other stores copy. A checkpoint of the same name is replaced when the new one is complete. A checkpoint does not
        contain the values of parameters, unless they have master weights. One in an ephemeral ``DiskStore``, which is
        what `offload` makes of a path, ends with the store: a warning is logged.

        Raises:
            SwapError: state of an earlier step cannot be written.
            StorageError: the checkpoint cannot be written; an older one of the name does not change.
            TypeError: the name, an option or a value of a state has a type ``load()`` cannot read; nothing is written.
            ValueError: the name is empty, or has a "/".

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.checkpoints()
        ['epoch 1']
        >>> optimizer.load("epoch 1")
        """
        store = self._namespace.store
        if isinstance(store, DiskStore) and not store.durable and not self._has_told:
            self._has_told = True
            _logger.warning("checkpoints in %r end with it: give offload() a DiskStore(folder, durable=True)", store)
        with self._lock, outside_inference(), torch.no_grad():
            self._checkpoints.save(checkpoint, self.param_groups, self._swap)

    def load(self, checkpoint: str) -> None:
        """Restore the state and the groups' options of a checkpoint, for any chunk size.

        State of the parameters' dtype is cast if that dtype has changed, as ``load_state_dict()`` does.

        Raises:
            NotFoundError: the checkpoint does not exist, or one of its tensors is missing; nothing has changed.
            ValueError: its groups, the shapes of its parameters, or its optimizer's class differ from this one's.
            StorageError: a tensor cannot be read. Some parameters have the state of the checkpoint, the others and the
                options have not changed: load it again, or load another one.

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.load("epoch 1")
        """
        with self._lock, outside_inference(), torch.no_grad():
            self._forget_reads()
            self._checkpoints.load(checkpoint, self.param_groups, self._swap)

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the store, sorted.

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.checkpoints()
        []
        """
        return self._checkpoints.names()

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Delete a checkpoint.

        Raises:
            NotFoundError: the checkpoint does not exist.

        >>> from cudafuture.store import DiskStore
        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), DiskStore("states", durable=True))
        >>> optimizer.save("epoch 1")
        >>> optimizer.delete_checkpoint("epoch 1")
        """
        with self._lock:
            self._checkpoints.delete(checkpoint)

    # ---- statistics and shutdown

    def statistics(self, last_step: bool = False) -> SwapStatistics:
        """Return counts and times since the optimizer was created, or of the last step and the backward before it.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> for _ in range(2):
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> optimizer.statistics().swap_out_state_bytes, optimizer.statistics(last_step=True).swap_out_state_bytes
        (48, 24)
        """
        with self._lock:
            states = self._swap.known()
            counters = self._last_step if last_step else self._swap.pipeline.counters
            stored = sum(tensor.nbytes for state in states for tensor in state.stored.values())
            return counters.statistics(stored, self._swap.resident_bytes)

    def flush(self) -> None:
        """Wait until all state is written.

        Raises:
            SwapError: some state cannot be written; it stays in memory.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> optimizer.flush()
        """
        with self._lock:
            self._swap.flush()

    def close(self) -> None:
        """Wait for operations in flight, and delete the state from the store, except checkpoints.

        A store that the optimizer created is closed. The optimizer cannot be used any more. Further calls do nothing.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states")
        >>> optimizer.close()
        """
        with self._lock:
            swapper, self._swapper = self._swapper, None
            self._drop_marks()
            try:
                if swapper is not None:
                    swapper.close()
            finally:
                self._namespace.close()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
