"""The CUDAFUTURE_* variables."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from cudafuture import config, errors


def test_defaults_apply_without_variables() -> None:
    settings = config.read({})
    assert settings.watcher_first_pause == pytest.approx(5e-6)
    assert settings.watcher_longest_pause == pytest.approx(5000e-6)
    assert 1 <= settings.submit_threads <= 32
    assert settings.submit_exit_seconds == 30
    assert not settings.debug_order
    assert not settings.debug_ownership
    assert not settings.debug_origin
    assert settings.rpc_secret_file is None
    assert settings.rpc_transports is None


def test_variables_are_read() -> None:
    environment = {
        "CUDAFUTURE_WATCHER_FIRST_PAUSE_US": "20",
        "CUDAFUTURE_SUBMIT_THREADS": "3",
        "CUDAFUTURE_RPC_SECRET_FILE": "/run/secrets/job",
        "CUDAFUTURE_RPC_TRANSPORTS": "uv, shm",
    }
    settings = config.read(environment)
    assert settings.rpc_secret_file == "/run/secrets/job"
    assert settings.rpc_transports == frozenset({"uv", "shm"})
    assert settings.watcher_first_pause == pytest.approx(20e-6)
    assert settings.submit_threads == 3


@pytest.mark.parametrize("text", ["", "fast", "-1", "0", "nan", "1e12"])
def test_nonsensical_value_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"CUDAFUTURE_SUBMIT_THREADS=.*at least 1"):
        config.read({"CUDAFUTURE_SUBMIT_THREADS": text})


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("", (False, False)),
        ("order", (True, False)),
        (" order ,", (True, False)),
        ("order,order", (True, False)),
        ("ownership", (False, True)),
        ("ownership, order", (True, True)),
    ],
)
def test_debug_is_list_of_words(text: str, on: tuple[bool, bool]) -> None:
    settings = config.read({"CUDAFUTURE_DEBUG": text})
    assert (settings.debug_order, settings.debug_ownership) == on


@pytest.mark.parametrize("text", ["orders", "ORDER", "order,all", "1"])
def test_unknown_debug_word_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"CUDAFUTURE_DEBUG='{text}': use order, origin, ownership, or leave it empty"
    ):
        config.read({"CUDAFUTURE_DEBUG": text})


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDAFUTURE_RPC_TRANSPORTS='tcp': use ibv, shm, uv, or leave it empty"):
        config.read({"CUDAFUTURE_RPC_TRANSPORTS": "tcp"})


def test_table_names_every_variable() -> None:
    asked = []

    class Spy(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.append(name)
            return default

    config.read(Spy())
    assert sorted(asked) == sorted(set(re.findall(r"``((?:CUDAFUTURE|XDG)_\w+)``", config.__doc__)))


def test_error_tree_is_complete() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.CUDAFutureError)
        assert re.search(rf"\b{name}\b", errors.__doc__), name


def test_storage_errors_carry_place_and_amount() -> None:
    error = errors.StorageError("short read", errno=5, path="/x", offset=1, wanted=3, got=2)
    assert isinstance(error, OSError)
    assert (error.errno, error.path, error.offset, error.wanted, error.got) == (5, "/x", 1, 3, 2)
    assert str(error) == "short read"
    assert str(errors.NotFoundError("no such key: 'k'")) == "no such key: 'k'"


@pytest.mark.parametrize(
    "duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"]
)
def test_storage_errors_keep_number_when_pickled(
    duplicate: Callable[[errors.QuotaError], errors.QuotaError],
) -> None:
    error = duplicate(errors.QuotaError("no room", errno=28, path="/x", offset=1, wanted=3, got=2))
    assert type(error) is errors.QuotaError
    assert (error.errno, error.path, error.offset, error.wanted, error.got) == (28, "/x", 1, 3, 2)
    assert str(error) == "no room"


def test_empty_secret_file_name_means_none() -> None:
    assert config.read({"CUDAFUTURE_RPC_SECRET_FILE": ""}).rpc_secret_file is None


def test_lost_worker_is_named_connection_error() -> None:
    error = errors.WorkerLostError("worker 'b' was lost", worker="b")
    assert isinstance(error, errors.RemoteError)
    assert isinstance(error, ConnectionError)
    assert error.worker == "b"
    assert str(error) == "worker 'b' was lost", "not OSError's idea of arguments"
    assert (error.type_name, error.remote_traceback) == ("", "")


def test_failed_calls_carry_results_by_worker() -> None:
    error = errors.CallsFailedError("1 of 2 calls has failed", {"a": KeyError("k")}, {"b": 3})
    assert error.failures["a"].args == ("k",)
    assert error.results == {"b": 3}
    assert str(error) == "1 of 2 calls has failed\n  a: KeyError: 'k'"
    assert str(errors.CallsFailedError("no call was made")) == "no call was made"


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("a message")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "a message"
