"""The stubs of the native modules say what was built, no more and no less."""

from __future__ import annotations

from pathlib import Path

import pytest

import cudafuture
import rpc_ext
from cudafuture import _C
from package.stub import differences
from rpc_ext import _C as rpc_C

STUB = Path(cudafuture.__file__).with_name("_C.pyi").read_text(encoding="utf-8")
RPC_STUB = Path(rpc_ext.__file__).with_name("_C.pyi").read_text(encoding="utf-8")


def test_stub_matches_module() -> None:
    assert differences(STUB, _C) == []


def test_rpc_ext_stub_matches_module() -> None:
    assert differences(RPC_STUB, rpc_C) == []


DOCTORED = {
    "a method is missing": ("    def done(self) -> bool: ...\n", "", "CUDAFuture.done is in the module but not"),
    "a function is missing": ("def any_device_with_streams() -> bool: ...\n", "", "any_device_with_streams is in"),
    "a value is missing": (
        "inline_executor: HostExecutor\n",
        "",
        "inline_executor is in the module but not in the stub",
    ),
    "a class has another name": ("class EventView:", "class Event:", "EventView is in the module but not in the stub"),
    "a function too many": ("def issued", "def more() -> None: ...\ndef issued", "more is in the stub but not"),
    "a method too many": (
        "    def ready",
        "    def more(self) -> int: ...\n    def ready",
        "CUDAFuture.more is in the stub",
    ),
    "a class too many": ("class UseStreams:", "class More: ...\nclass UseStreams:", "More is in the stub but not"),
    "a special method is missing": (
        "    def __await__(self) -> Generator[Any, None, _T]: ...\n",
        "",
        "__await__ is in",
    ),
    "a parameter has another name": ("def cancelled(self)", "def cancelled(self, a: int)", "takes (any a) in the stub"),
    "a parameter is missing": (
        "result(self, timeout: float | None = None)",
        "result(self)",
        "CUDAFuture.result takes ()",
    ),
    "by keyword is by place": ("wait(self, *, non_", "wait(self, non_", "CUDAFuture.wait takes (any non_blocking"),
    "by place is by keyword": ("collect_all(futures", "collect_all(*, futures", "collect_all takes (keyword futures)"),
    "by name is by place only": (
        "self, timeout: float | None = None",
        "self, timeout: float | None = None, /",
        "exception",
    ),
    "the order is another": (
        "(future: CUDAFuture[Any], timeout: float | None)",
        "(timeout: Any, future: Any)",
        "wait_done",
    ),
    "a default is missing": (
        "cancel_parts: bool = False",
        "cancel_parts: bool",
        "gather takes (any futures, any cancel_p",
    ),
    "a default too many": ("device: _Device, priority: int", "device: _Device, priority: int = 0", "pool_stream takes"),
    "a default is another": ("non_blocking: bool = True", "non_blocking: bool = False", "non_blocking = False"),
    "a default is of another type": ("priority: int = 0", "priority: bool = False", "CUDAFuture.__init__ takes"),
    "a property cannot be set": (
        "    @released.setter\n    def released(self, released: CUDAFuture[None]) -> None: ...\n",
        "",
        "released is a property in the stub but a property that can be set",
    ),
    "a method is a property": (
        "    def cancelled(self)",
        "    @property\n    def cancelled(self)",
        "CUDAFuture.cancelled is a prop",
    ),
    "a property is a method": (
        "    @property\n    def priority",
        "    def priority",
        "CUDAFuture.priority is a function in",
    ),
    "a static method is a method": (
        "    @staticmethod\n    def failed(",
        "    def failed(self, ",
        "CUDAFuture.failed is a",
    ),
    "a value of another type": (
        "callback_thread: HostExecutor",
        "callback_thread: str",
        "callback_thread is a value of str",
    ),
    "a class that is final": ("@final\n", "", "CUDAFuture.(class) is a derivable class in the stub but"),
    "a class that is not final": (
        "class EventView:",
        "@final\nclass EventView:",
        "EventView.(class) is a final class in",
    ),
    "another return type": (
        "def query(self) -> bool",
        "def query(self) -> int",
        "EventView.query returns int in the stub",
    ),
}


@pytest.mark.parametrize(("wanted", "doctored", "complaint"), DOCTORED.values(), ids=DOCTORED.keys())
def test_wrong_stub_is_found(wanted: str, doctored: str, complaint: str) -> None:
    assert wanted in STUB, "the stub has changed: doctor something that it still says"
    found = differences(STUB.replace(wanted, doctored), _C)
    assert any(complaint in difference for difference in found), found


DOCTORED_RPC = {
    "a method is missing": ("    def refused(self) -> dict[int, int]: ...\n", "", "refused is in the module but"),
    "a function too many": ("def record_rrefs", "def more() -> None: ...\ndef record_rrefs", "more is in the stub"),
    "a class is missing": ("class Reply:", "class Replies:", "Reply is in the module but not in the stub"),
    "a value of another type": ("MAGIC: bytes", "MAGIC: str", "MAGIC is a value of str in the stub"),
    "a parameter has another name": ("to: int, payload", "worker: int, payload", "call takes (any worker"),
    "a parameter is missing": ("        rank: int,\n", "", "Agent.__init__ takes (any names, any exchange"),
    "by keyword is by place": (
        "        *,\n        key",
        "        key",
        "any key, any contents, any serve, any tell) in the stub",
    ),
    "another return type": ("-> dict[int, int]", "-> dict[str, int]", "refused returns dict[str, int] in"),
}


@pytest.mark.parametrize(("wanted", "doctored", "complaint"), DOCTORED_RPC.values(), ids=DOCTORED_RPC.keys())
def test_wrong_rpc_ext_stub_is_found(wanted: str, doctored: str, complaint: str) -> None:
    assert wanted in RPC_STUB, "the stub has changed: doctor something that it still says"
    found = differences(RPC_STUB.replace(wanted, doctored), rpc_C)
    assert any(complaint in difference for difference in found), found


def test_open_default_is_no_difference() -> None:
    assert differences(STUB.replace("priority: int = 0", "priority: int = ..."), _C) == []


def test_each_stub_overload_is_compared() -> None:
    good = "    @overload\n    def result(self, timeout: None = None) -> _T: ...\n"
    assert differences(STUB.replace("    def result(", good + "    @overload\n    def result("), _C) == []
    bad = "    @overload\n    def result(self, seconds: None = None) -> _T: ...\n"
    (found,) = differences(STUB.replace("    def result(", bad + "    @overload\n    def result("), _C)
    assert "seconds" in found
