"""Check of RPC for ``cudafuture doctor``: an entry point, so that `cudafuture` does not know this package."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from cudafuture.config import config
from cudafuture.doctor import Diagnosis
from rpc_ext._options import read_secret

__all__ = ["check"]

NAME = "rpc"


def check(_: Path) -> Iterator[Diagnosis]:
    """Yield what is found about TensorPipe, and about the secret that the environment names."""
    if not dist.is_available() or not dist.rpc.is_available():
        yield Diagnosis(NAME, "broken", "this build of torch has no RPC", "install a build with TensorPipe")
        return
    transports = ", ".join(sorted(config.rpc_transports)) if config.rpc_transports else "chosen by TensorPipe"
    yield Diagnosis(NAME, "ok", f"TensorPipe, transports {transports}")
    path = config.rpc_secret_file
    if path is None:
        advice = "set CUDAFUTURE_RPC_SECRET_FILE where the network is not yours alone: calls are not authenticated"
        yield Diagnosis("rpc secret", "ok", "none", advice)
        return
    try:
        read_secret(None)
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as e:
        yield Diagnosis("rpc secret", "broken", str(e), "write a file with at least 16 random bytes, and chmod 600 it")
        return
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Diagnosis("rpc secret", "slow", f"others may read {path}", f"chmod 600 {path}")
    else:
        yield Diagnosis("rpc secret", "ok", path)
