"""Server that has imported torch, and forks a process for each script, so that a script need not import torch.

The server runs ``exec(next_script(N))`` in its main module, where N is its end of a socket pair. ``next_script``
returns in the forked processes alone. A process therefore runs its script as ``python -c`` does, and ends as the
interpreter ends.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

__all__ = ["REQUEST", "next_script"]

REQUEST = 1 << 17  # bytes at most of a request


def next_script(number: int) -> str:
    """Fork a process for each request; in that process, return the script of the request.

    A request is a JSON object of the script, its arguments, environment and working directory, with descriptors for
    stdout, stderr and the pipes of `say` and `hear`. The answers are JSON arrays: a process ID and None once the
    process has begun, and its exit code, negative for a signal, once it has ended. The server ends with the other end
    of its socket.
    """
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=number)
    running: dict[int, int] = {}  # descriptors of processes, and their IDs
    while True:
        for ready in select.select([number, *running], [], [])[0]:
            if ready != number:
                os.close(ready)
                pid, status = os.waitpid(running.pop(ready), 0)
                _answer(control, [pid, os.waitstatus_to_exitcode(status)])
                continue
            message, descriptors, _, _ = socket.recv_fds(control, REQUEST, 4)
            if not message:
                os._exit(0)
            request = json.loads(message)
            has_begun, begun = os.pipe()
            pid = os.fork()
            if pid == 0:
                for inherited in (number, has_begun, *running):
                    os.close(inherited)
                control.detach()
                script = _become(request, descriptors)
                os.close(begun)
                return script
            for descriptor in (begun, *descriptors):
                os.close(descriptor)
            os.read(has_begun, 1)  # until the process has a process group and a handler of Ctrl-C
            os.close(has_begun)
            running[os.pidfd_open(pid)] = pid
            _answer(control, [pid, None])


def _answer(control: socket.socket, answer: list[int | None]) -> None:
    try:
        control.send(json.dumps(answer).encode())
    except BrokenPipeError:
        os._exit(0)


def _become(request: dict[str, Any], descriptors: list[int]) -> str:
    """Take the place of a new interpreter, and return the script."""
    os.setsid()  # a Ctrl-C in the terminal is the test's own affair
    out, errors, to_test, from_test = descriptors
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.close(out)
    os.close(errors)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = ["-c", *request["arguments"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return TALK.format(to_test=to_test, from_test=from_test) + str(request["script"])


# The line is written with one call, so that lines of several threads and forked children do not mix.
TALK = """
def say(line, _pipe={to_test}):
    import os
    os.write(_pipe, str(line).encode() + b"\\n")

def hear(_pipe={from_test}):
    import os
    line = b""
    while not line.endswith(b"\\n"):
        piece = os.read(_pipe, 1)
        if not piece:
            os._exit(99)  # the test is gone
        line += piece
    return line[:-1].decode()
"""
