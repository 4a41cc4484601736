"""A worker in a process of its own that serves folders to the tests of this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rpc_ext import StoreService, serve_store
from support.child import Child
from support.patience import PATIENCE
from support.rpc_callees import SHARED_MEMORY, working

SERVER = "server"

CODE = """
import sys
from remote_store.server import be_server
be_server(hear, say, sys.argv[1])
"""


def be_server(hear: Callable[[], str], say: Callable[[object], None], rendezvous: str) -> None:
    """Run the server process: start and stop services on request, until the request is "end"."""
    torch.set_num_threads(1)
    services: dict[str, StoreService] = {}
    with working(SERVER, 1, 2, rendezvous, num_worker_threads=4, transports=SHARED_MEMORY):
        say("ready")
        while (line := hear()) != "end":
            verb, name, folder, options = json.loads(line)
            if verb == "start":
                services[name] = serve_store(folder, name=name, **options)
            else:
                services.pop(name).close()
            say("done")


class Server:
    """The tests' side of the server process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @contextlib.contextmanager
    def serve(self, name: str, folder: Path, **options: Any) -> Iterator[None]:
        """Serve `folder` under `name` until the scope ends."""
        self._request("start", name, str(folder), options)
        try:
            yield
        finally:
            self._request("stop", name, "", {})

    def _request(self, *arguments: Any) -> None:
        self._child.say(json.dumps(arguments))
        assert self._child.hear(PATIENCE) == "done"


@contextlib.contextmanager
def server_process(rendezvous: Path) -> Iterator[Server]:
    """Start the server process, and make this process the worker "client" of the same job."""
    with Child(CODE, str(rendezvous)) as child:
        with working("client", 0, 2, rendezvous, num_worker_threads=4, transports=SHARED_MEMORY):
            assert child.hear(PATIENCE) == "ready"
            yield Server(child)
            child.say("end")
        assert child.end(PATIENCE) == 0, child.errors()
