"""The examples in the docstrings of `cudafuture.testing.fakecuda`, each in a process of its own."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable

import pytest

from cudafuture.testing import fakecuda

EXAMPLES = [
    f"{name}.{method}" if method else name
    for name in fakecuda.__all__
    for method in ["", *(vars(getattr(fakecuda, name)) if inspect.isclass(getattr(fakecuda, name)) else [])]
    if ">>> "
    in (getattr(getattr(fakecuda, name), method, None) if method else getattr(fakecuda, name)).__doc__.__str__()
    and getattr(fakecuda, name).__module__.startswith(fakecuda.__name__)
]

RUN = """
import doctest, io, subprocess, sys, operator
names = dict(torch=torch, fakecuda=fakecuda, subprocess=subprocess, sys=sys)
thing = operator.attrgetter({name!r})(fakecuda)
test = doctest.DocTestParser().get_doctest(thing.__doc__, names, {name!r}, None, 0)
report = io.StringIO()
doctest.DocTestRunner(optionflags={flags}).run(test, out=report.write)
assert not report.getvalue(), report.getvalue()
"""


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(alone: Callable[..., str], name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    alone(RUN.format(name=name, flags=flags), FAKECUDA_RACES=str(int("races" in name)), FAKECUDA_SCHEDULE="jitter")
