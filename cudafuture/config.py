"""Settings from the CUDAFUTURE_* environment variables, read once, in one table.

=======================================  ========  ==================================================================
variable                                 default   what it sets
=======================================  ========  ==================================================================
``CUDAFUTURE_WATCHER_FIRST_PAUSE_US``    5         microseconds between two polls of device events, right after an
                                                   event completed or was added
``CUDAFUTURE_WATCHER_LONGEST_PAUSE_US``  5000      microseconds to which that pause grows while no event completes
``CUDAFUTURE_SUBMIT_THREADS``            cores+4,  threads of the executor that ``submit`` uses by default
                                         max. 32
``CUDAFUTURE_SUBMIT_EXIT_SECONDS``       30        seconds that the process's end waits for functions of ``submit``,
                                                   counted anew whenever one ends
``CUDAFUTURE_DEBUG``                     (none)    words with commas between them. ``order``: compare the collectives
                                                   and messages that the ranks issue. ``origin``: repr and
                                                   logs show the line that made a future. ``ownership``: fail
                                                   operations whose tensors the program changes too early
``CUDAFUTURE_DEBUG_DIR``                 see text  folder of the sockets that ``python -m cudafuture ps`` asks.
                                                   Default: ``cudafuture`` in ``XDG_RUNTIME_DIR``, or
                                                   ``/tmp/cudafuture-UID``. ``off``: no socket
``CUDAFUTURE_TRACE``                     (none)    folder in which each process records a trace, from the import of
                                                   the library to its end; see ``cudafuture.trace``
``CUDAFUTURE_RPC_SECRET_FILE``           (none)    a file with the secret that ``rpc_ext.init_rpc`` uses by default
``CUDAFUTURE_RPC_TRANSPORTS``            (none)    the transports that ``rpc_ext.init_rpc`` uses by default, such as
                                                   ``uv`` or ``shm,uv``
=======================================  ========  ==================================================================

``config`` holds the settings that were read when the library was imported. A value that does not parse raises
ValueError on import, with the variable's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Config", "config", "debug_dir", "read"]


@dataclass(frozen=True)
class Config:
    """The settings of this process. Times are in seconds."""

    watcher_first_pause: float
    watcher_longest_pause: float
    submit_threads: int
    submit_exit_seconds: float
    debug_order: bool
    debug_ownership: bool
    debug_origin: bool
    debug_dir: str  # empty: no socket
    trace_dir: str  # empty: no trace
    rpc_secret_file: str | None
    rpc_transports: frozenset[str] | None


def read(environ: Mapping[str, str]) -> Config:
    """Read the settings from `environ`.

    Raises:
        ValueError: a number is not positive, or a word is unknown.

    >>> read({"CUDAFUTURE_SUBMIT_THREADS": "3"}).submit_threads
    3
    """
    debug = _words(environ, "CUDAFUTURE_DEBUG", {"order", "origin", "ownership"})
    return Config(
        watcher_first_pause=_positive(environ, "CUDAFUTURE_WATCHER_FIRST_PAUSE_US", 5) * 1e-6,
        watcher_longest_pause=_positive(environ, "CUDAFUTURE_WATCHER_LONGEST_PAUSE_US", 5000) * 1e-6,
        submit_threads=int(_positive(environ, "CUDAFUTURE_SUBMIT_THREADS", min(32, (os.cpu_count() or 1) + 4))),
        submit_exit_seconds=_positive(environ, "CUDAFUTURE_SUBMIT_EXIT_SECONDS", 30),
        debug_order="order" in debug,
        debug_origin="origin" in debug,
        debug_ownership="ownership" in debug,
        debug_dir=debug_dir(environ),
        trace_dir=environ.get("CUDAFUTURE_TRACE", ""),
        rpc_secret_file=environ.get("CUDAFUTURE_RPC_SECRET_FILE") or None,
        rpc_transports=_words(environ, "CUDAFUTURE_RPC_TRANSPORTS", {"ibv", "shm", "uv"}) or None,
    )


def debug_dir(environ: Mapping[str, str]) -> str:
    """Return the folder of the debug sockets of a process with this environment; empty: it has no socket.

    >>> debug_dir({"XDG_RUNTIME_DIR": "/run"})
    '/run/cudafuture'
    """
    chosen, runtime = environ.get("CUDAFUTURE_DEBUG_DIR"), environ.get("XDG_RUNTIME_DIR")
    if chosen:
        return "" if chosen == "off" else str(Path(chosen).absolute())
    has_runtime = runtime is not None and Path(runtime).is_dir()  # containers inherit the name of a folder
    return f"{runtime}/cudafuture" if has_runtime else f"/tmp/cudafuture-{os.geteuid()}"


def _words(environ: Mapping[str, str], name: str, known: set[str]) -> frozenset[str]:
    words = frozenset(word.strip() for word in environ.get(name, "").split(",")) - {""}
    if words - known:
        raise ValueError(f"{name}={environ[name]!r}: use {', '.join(sorted(known))}, or leave it empty")
    return words


def _positive(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1 <= number < 1e9:
        raise ValueError(f"{name}={text!r} is not a number of at least 1; the default is {default:g}")
    return number


config = read(os.environ)
