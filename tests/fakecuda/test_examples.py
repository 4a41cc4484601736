"""The examples in the docstrings of `cudafuture.testing.fakecuda`, each in a process of its own."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable, Iterator

import pytest

from cudafuture.testing import fakecuda

pytestmark = pytest.mark.cuda


def with_examples() -> Iterator[str]:
    """Give the public names whose docstrings have examples, those of methods too."""
    for name in fakecuda.__all__:
        thing = getattr(fakecuda, name)
        if not str(getattr(thing, "__module__", "")).startswith(fakecuda.__name__):
            continue  # of the simulated accelerator
        members = vars(thing).items() if inspect.isclass(thing) else []
        for path, each in [(name, thing), *((f"{name}.{method}", member) for method, member in members)]:
            if ">>> " in (getattr(each, "__doc__", None) or ""):
                yield path


RUN = """
import doctest, io, subprocess, sys, operator
names = dict(torch=torch, fakecuda=fakecuda, subprocess=subprocess, sys=sys)
thing = operator.attrgetter({name!r})(fakecuda)
test = doctest.DocTestParser().get_doctest(thing.__doc__, names, {name!r}, None, 0)
report = io.StringIO()
doctest.DocTestRunner(optionflags={flags}).run(test, out=report.write)
assert not report.getvalue(), report.getvalue()
"""


@pytest.mark.parametrize("name", list(with_examples()))
def test_example_runs(alone: Callable[..., str], name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    alone(RUN.format(name=name, flags=flags), FAKECUDA_RACES=str(int("races" in name)), FAKECUDA_SCHEDULE="jitter")
