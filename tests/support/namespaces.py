"""Hosts on this machine: processes in network namespaces of their own, and what lies between two of them.

A namespace goes with its process, so nothing is left whatever becomes of a test.

::

    Cable:   first host, 10.231.77.1 ── veth ════════════ veth ── second, 10.231.77.2    cut() and mend(): the link
    Relay:   first host, 10.231.77.1 ── tun ── the test ── tun ── second, 10.231.77.2    hands packets on, as it is told
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from types import TracebackType

import pytest

ADDRESSES = "10.231.77.1", "10.231.77.2"  # only the two ever see them
_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000  # <sched.h>

# The first lines of a process that plays a host; they wait for its connection. It has users of its own as well: else
# TensorPipe would copy tensors from one process's memory to the other's.
BE_A_HOST = f"""
import ctypes, os, pathlib
libc = ctypes.CDLL(None, use_errno=True)
for namespace in ({_CLONE_NEWNET}, {_CLONE_NEWUSER}):
    if libc.unshare(namespace):
        raise OSError(ctypes.get_errno(), "unshare")
pathlib.Path("/proc/self/uid_map").write_text("0 0 1")
os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "net0"
say("host")
assert hear() == "connected"
"""


def skip_unless_possible() -> None:
    """Skip the test where this process may not make hosts."""
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (iproute2 and util-linux)")
    trial = ["unshare", "--net", "ip", "link", "add", "net0", "type", "veth", "peer", "name", "net1"]
    if subprocess.run(trial, capture_output=True, timeout=60, check=False).returncode != 0:
        pytest.skip("network namespaces cannot be made here")


def run(*command: str, on: int | None = None) -> str:
    """Run a command, on the host of a process if one is named; return what it prints."""
    there = [] if on is None else ["nsenter", "--net", "--target", str(on)]
    return subprocess.run([*there, *command], check=True, capture_output=True, timeout=60, text=True).stdout


class Cable:
    """One link between the hosts of two processes."""

    def __init__(self, first: int, second: int) -> None:
        self._hosts = (first, second)

    def __enter__(self) -> Cable:
        first, second = self._hosts
        run("ip", "link", "add", "net0", "netns", str(first), "type", "veth", "peer", "net0", "netns", str(second))
        give_addresses(self._hosts)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def cut(self) -> None:
        run("ip", "link", "set", "net0", "down", on=self._hosts[1])

    def mend(self) -> None:
        run("ip", "link", "set", "net0", "up", on=self._hosts[1])


class Relay:
    """A line between the hosts of two processes on which each packet passes through this process.

    Args:
        rate: bytes per second that pass, in each direction.
    """

    def __init__(self, first: int, second: int, rate: float) -> None:
        self._hosts, self._rate = (first, second), rate
        self._undo = contextlib.ExitStack()
        self.came = 0
        """bytes that came so far, from both sides"""
        self.limit: int | None = None
        """bytes after which none are handed on any more"""

    def __enter__(self) -> Relay:
        with contextlib.ExitStack() as undo:
            ends = [self._plug_in(i, undo) for i in range(2)]
            give_addresses(self._hosts)
            stopped, stop = os.pipe()
            undo.callback(os.close, stopped)
            for source, target in (ends, ends[::-1]):
                thread = threading.Thread(target=self._hand_on, args=(source, target, stopped))
                thread.start()
                undo.callback(thread.join)
            undo.callback(os.close, stop)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def _plug_in(self, side: int, undo: contextlib.ExitStack) -> int:
        end = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        undo.callback(os.close, end)
        interface = f"cf{self._hosts[side]}"  # unique as long as the process lives
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI))
        run("ip", "link", "set", interface, "netns", str(self._hosts[side]), "name", "net0")
        return end

    def _hand_on(self, source: int, target: int, stopped: int) -> None:
        with contextlib.suppress(OSError):  # a host is gone, and its end of the line
            self._hand_on_until(source, target, stopped)

    def _hand_on_until(self, source: int, target: int, stopped: int) -> None:
        free_at = time.monotonic()  # when the line is free again
        while True:
            ready, _, _ = select.select([source, stopped], [], [])
            if stopped in ready:
                return
            packet = os.read(source, 1 << 16)
            free_at = max(free_at, time.monotonic()) + len(packet) / self._rate
            if (ahead := free_at - time.monotonic()) > 0.001:
                time.sleep(ahead)
            self.came += len(packet)
            if self.limit is None or self.came < self.limit:
                with contextlib.suppress(BlockingIOError):  # a queue that is full loses packets
                    os.write(target, packet)


def give_addresses(hosts: tuple[int, int]) -> None:
    """Give both their addresses, on interfaces that are called net0."""
    for host, address in zip(hosts, ADDRESSES, strict=True):
        run("ip", "link", "set", "lo", "up", on=host)
        run("ip", "address", "add", f"{address}/24", "dev", "net0", on=host)
        run("ip", "link", "set", "net0", "up", on=host)
    for host in hosts:  # an interface that is just coming up may not be shown to who asks for its address
        end = time.monotonic() + 60
        while "LOWER_UP" not in (shown := run("ip", "-o", "link", "show", "net0", on=host)) or "state DOWN" in shown:
            assert time.monotonic() < end, shown


def skip_without_tun() -> None:
    """Skip the test where a line cannot pass through a process."""
    if not os.access(_TUN, os.R_OK | os.W_OK):
        pytest.skip(f"there is no {_TUN}")
