"""Types of the native module. A test compares this file with the module that was built."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C._distributed_rpc import PyRRef, TensorPipeAgent

MAGIC: bytes

class Listener(Protocol):
    def on_reply(self, payload: bytes, tensors: list[torch.Tensor]) -> None: ...
    def on_error(self, kind: int, message: str) -> None: ...

class Agent(TensorPipeAgent):
    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int,
        options: Any,
        reverse_device_maps: dict[str, dict[torch.device, torch.device]],
        devices: list[torch.device],
        *,
        key: bytes,
        serve: Callable[[bytes, list[torch.Tensor], Reply], None],
        tell: Callable[[int, str], None],
    ) -> None: ...
    def call(
        self, to: int, payload: bytes, tensors: list[torch.Tensor], timeout: float, listener: Listener
    ) -> None: ...
    def refused(self) -> dict[int, int]: ...

class Reply:
    @property
    def sender(self) -> int: ...
    def send(self, payload: bytes, tensors: list[torch.Tensor]) -> None: ...

def listening_address() -> str: ...
def in_distributed_autograd() -> bool: ...
def record_rrefs() -> None: ...
def forget_rrefs() -> None: ...
def when_rrefs_are_confirmed(fn: Callable[[], object]) -> None: ...
def when_owned(rref: PyRRef[Any], fn: Callable[[], object]) -> None: ...
