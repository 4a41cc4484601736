"""The CUDAFUTURE_* variables."""

import re

import pytest

from cudafuture import config, errors


def test_defaults_hold_where_nothing_is_set():
    settings = config.read({})
    assert settings.watcher_first_pause == pytest.approx(5e-6)
    assert settings.watcher_longest_pause == pytest.approx(5000e-6)
    assert 1 <= settings.submit_threads <= 32
    assert not settings.debug_order


def test_variables_are_read():
    settings = config.read({"CUDAFUTURE_WATCHER_FIRST_PAUSE_US": "20", "CUDAFUTURE_SUBMIT_THREADS": "3"})
    assert settings.watcher_first_pause == pytest.approx(20e-6)
    assert settings.submit_threads == 3


@pytest.mark.parametrize("text", ["", "fast", "-1", "0", "nan", "1e12"])
def test_a_value_that_makes_no_sense_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"CUDAFUTURE_SUBMIT_THREADS=.*at least 1"):
        config.read({"CUDAFUTURE_SUBMIT_THREADS": text})


@pytest.mark.parametrize(("text", "on"), [("", False), ("order", True), (" order ,", True), ("order,order", True)])
def test_debug_is_a_list_of_words(text, on):
    assert config.read({"CUDAFUTURE_DEBUG": text}).debug_order is on


@pytest.mark.parametrize("text", ["orders", "ORDER", "order,all", "1"])
def test_a_word_that_debug_does_not_know_is_refused_by_name(text):
    with pytest.raises(ValueError, match=rf"CUDAFUTURE_DEBUG='{text}': order is wanted, or nothing"):
        config.read({"CUDAFUTURE_DEBUG": text})


def test_the_table_names_every_variable_that_is_read():
    asked = []

    class Spy(dict):
        def get(self, name, default=None):
            asked.append(name)
            return default

    config.read(Spy())
    assert sorted(asked) == sorted(set(re.findall(r"``(CUDAFUTURE_\w+)``", config.__doc__)))


def test_every_error_is_in_the_tree_that_the_docstring_draws():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.CUDAFutureError)
        assert re.search(rf"\b{name}\b", errors.__doc__), name


def test_storage_errors_carry_where_and_how_much():
    error = errors.StorageError("short read", errno=5, path="/x", offset=1, wanted=3, got=2)
    assert isinstance(error, OSError)
    assert (error.errno, error.path, error.offset, error.wanted, error.got) == (5, "/x", 1, 3, 2)
    assert str(error) == "short read"
    assert str(errors.NotFoundError("no such key: 'k'")) == "no such key: 'k'"
