"""Every public name is documented, and every example runs: those in docstrings, in README.md and in docs/."""

from __future__ import annotations

import ast
import contextlib
import doctest
import gc
import importlib
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

import pytest
import torch
import torch.distributed as dist

import cudafuture
import rpc_ext
from cudafuture import CUDAFuture, EventView, InvalidStateError, distributed, errors
from cudafuture.bench import Suite
from cudafuture.testing import World, sim
from package.compiled import compile_examples
from support.soak import SOAK

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))]

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_PYTHON = {"sh", "text", "{toctree}", "{eval-rst}"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

sim.prepare()  # before an example computes a gradient

# Names that the examples of a page expect.
GIVEN: dict[str, dict[str, Any]] = {
    "README.md": {"buckets": [torch.ones(2), torch.ones(3)], "apply": lambda bucket: None},
}

# Their examples are for the ranks of a world of two.
FOR_TWO = {"batch_isend_irecv", "recv", "recv_object_list", "send", "send_object_list"}

# One worker, which calls itself, is enough for the examples of RPC; these begin and end it themselves.
WITHOUT_A_SESSION = {"call_at_end", "init_rpc", "shutdown"}

# Public names for other modules of rpc_ext only: neither an example nor the reference shows them.
INTERNAL = {
    "rpc_ext.batch.add",
    "rpc_ext.batch.answered",
    "rpc_ext.batch.direct",
    "rpc_ext.batch.look",
    "rpc_ext.batch.takes_calls_to",
    "rpc_ext.session.Session.destination",
    "rpc_ext.session.Session.end",
    "rpc_ext.session.Session.has_agent",
    "rpc_ext.session.Session.timeout",
}

# There is no EventView where there is no device; what its methods do is shown by the tests that have one.
NEEDS_A_DEVICE = {EventView}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Give the examples with collectives a process group: of one process, over Gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def rpc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """Return the context that starts RPC for examples: a worker that calls itself. It ends every session."""
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    where = "tcp://127.0.0.1:0"
    yield lambda: rpc_ext.init_rpc("me", rank=0, world_size=1, init_method=where)
    with contextlib.suppress(InvalidStateError):
        rpc_ext.shutdown(timeout=30)


@pytest.fixture(autouse=True)
def _no_accelerator_afterwards() -> Iterator[None]:
    yield
    sim.disable()


@pytest.fixture(autouse=True)
def _the_environment_afterwards() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _a_folder_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_examples(text: str, name: str, names: dict[str, Any], line: int = 0, backend: str = "") -> str:
    """Run the ``>>>`` examples in a text, compiled if there is a backend; return what was wrong, or nothing."""
    report = io.StringIO()
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, line)
    test.globs = names  # not a copy: the next block of a page goes on with them
    if backend:
        compile_examples(test, backend)
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.write, clear_globs=False)
    return report.getvalue()


def run_page(text: str, name: str, names: dict[str, Any]) -> str:
    """Run a page's blocks of Python one after the other, in one namespace."""
    report = ""
    for fence in FENCE.finditer(text):
        language, source = fence.groups()
        line = text.count("\n", 0, fence.start(2))
        if language != "python":
            continue
        if source.startswith(">>>"):
            report += run_examples(source, name, names, line)
        else:
            exec(compile("\n" * line + source, name, "exec", dont_inherit=True), names)
    return report


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_page_runs(page: Path, group: None, rpc: object, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(f"page_{page.stem}")  # from which its functions can be unpickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(GIVEN.get(page.name, {}))
    report = run_page(page.read_text(encoding="utf-8"), page.name, vars(module))
    assert not report, report


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_code_is_skipped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fences = FENCE.findall(text)
    assert len(re.findall(r"^\s*(```|~~~)", text, re.MULTILINE)) == 2 * len(fences), "a block is indented or not closed"
    for language, source in fences:
        assert language == "python" or language in NOT_PYTHON, f"what is {language!r}?"
        assert language == "python" or ">>>" not in source
        assert source.startswith(">>>") or ">>>" not in source, "examples and plain code do not mix in one block"


def test_documented_error_tree_matches_code() -> None:
    drawn = [line.strip() for line in (errors.__doc__ or "").splitlines() if "--" in line or "(RuntimeError)" in line]
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    (tree,) = [source for language, source in FENCE.findall(page) if language == "text"]
    assert tree.splitlines() == drawn


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"CUDAFutureError"}))
def test_error_tree_page_is_complete(name: str) -> None:
    error = getattr(errors, name)
    row = next(line for line in (errors.__doc__ or "").splitlines() if f"-- {name} " in line)
    builtin = re.search(r"\(([^)]+)\)", row)
    bases = [base.__qualname__ for base in error.__bases__]
    assert error.__bases__[0].__module__ == "cudafuture.errors"
    assert bases[1:] == ([each.rpartition(".")[2] for each in builtin[1].split(", ")] if builtin else [])
    assert ("|   " in row) == (bases[0] != "CUDAFutureError")


def texts_in(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "draw_pictures.py", tmp_path], check=True)
    kept = {picture.name: texts_in(picture) for picture in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert {picture.name: texts_in(picture) for picture in tmp_path.iterdir()} == kept
    assert all(kept.values())
    linked = {name for page in PAGES for name in re.findall(r"\]\((?:docs/)?pictures/(.*)\)", page.read_text("utf-8"))}
    assert linked == {picture.name for picture in (ROOT / "docs" / "pictures").iterdir()}


def test_index_of_versions_has_the_newest_first(tmp_path: Path) -> None:
    for name in ("0.2.0", "0.10.0", "0.10.1rc1", "wheels", "0.9.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    subprocess.run([sys.executable, ROOT / "tools" / "docs_index.py", tmp_path], check=True, stdout=subprocess.DEVNULL)
    links = re.findall('href="(.*)/index.html"', (tmp_path / "index.html").read_text(encoding="utf-8"))
    assert links == ["0.10.1rc1", "0.10.0", "0.9.2", "0.2.0"]
    assert "url=0.10.0/" in (tmp_path / "latest.html").read_text(encoding="utf-8")


def test_wrong_code_is_found() -> None:
    assert "Expected:\n    3\nGot:\n    2" in run_page("```python\n>>> 1 + 1\n3\n```\n", "page", {})
    assert "NameError" in run_page("```python\nx = 1\n```\n\n```python\n>>> x\n1\n>>> y\n1\n```\n", "page", {})
    with pytest.raises(ZeroDivisionError):
        run_page("text\n\n```python\n1 / 0\n```\n", "page", {})


# ---- docstrings


def public_modules() -> list[ModuleType]:
    found: list[ModuleType] = []
    for package in (cudafuture, rpc_ext):
        names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        found += [package, *(importlib.import_module(name) for name in names if "._" not in name)]
    return found


def public_names() -> dict[str, tuple[Any, ModuleType]]:
    """Return what each public module offers, under the name of the module that offers it first, and that module."""
    found: dict[str, tuple[Any, ModuleType]] = {}
    known: set[int] = set()
    for module in public_modules()[::-1]:  # the front door last: it only passes on
        for name in module.__all__:
            thing = getattr(module, name)
            if id(thing) not in known and not isinstance(thing, (ModuleType, Suite)):  # an entry point names a suite
                known.add(id(thing))
                found[f"{module.__name__}.{name}"] = thing, module
    return found


def is_function(thing: Any) -> bool:
    """Return whether a public name is a function; a type's alias, which is for annotations, is none."""
    return callable(thing) and not isinstance(thing, type) and get_origin(thing) is None


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, with those of bases in private modules."""
    private = [base for base in cls.__bases__ if base.__module__.rpartition(".")[2].startswith("_")]
    for name, member in [item for each in (*private, cls) for item in vars(each).items()]:
        if not name.startswith("_") and (isinstance(member, property) or callable(member)):
            yield name, member


NAMES = public_names()
CLASSES = {name: thing for name, (thing, _) in NAMES.items() if isinstance(thing, type)}
METHODS = {f"{name}.{method}": member for name, cls in CLASSES.items() for method, member in members(cls)}
EVERYTHING = {**{name: thing for name, (thing, _) in NAMES.items()}, **METHODS}

CALLABLES = {
    name: thing
    for name, thing in EVERYTHING.items()
    if callable(thing)
    and get_origin(thing) is None
    and not isinstance(thing, type)
    and CLASSES.get(name.rpartition(".")[0]) not in NEEDS_A_DEVICE
    and name not in INTERNAL
    and not getattr(CLASSES.get(name.rpartition(".")[0]), "_is_protocol", False)  # the classes that have it show it
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_public_name_has_docstring(name: str) -> None:
    thing = EVERYTHING[name]
    if isinstance(thing, (type, property)) or is_function(thing):
        text = thing.__doc__ or ""
        assert text.removeprefix(native_signature(text)).strip(), f"{name} has no docstring"
    else:  # a value: its module says what it is
        assert name.rpartition(".")[2] in (inspect.getdoc(NAMES[name][1]) or ""), f"the module does not speak of {name}"


def native_signature(text: str) -> str:
    """Return the line with which nanobind begins the docstring of a function."""
    match = re.match(r"\w+\(.*\) -> .*\n", text)
    return match[0] if match else ""


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_function_has_example(name: str) -> None:
    assert ">>> " in (CALLABLES[name].__doc__ or ""), f"{name} has no example"


@pytest.mark.parametrize("name", NAMES)
def test_reference_has_every_public_name(name: str) -> None:
    reference = "\n".join(REFERENCE)
    module, _, short = name.rpartition(".")
    block = rf"automodule:: {re.escape(module)}\n   :members:"
    whole = re.search(rf"{block}$", reference, re.MULTILINE)
    listed = re.search(rf"{block} .*\b{short}\b", reference) or re.search(rf"::.*[ .]{short}\b", reference)
    thing = EVERYTHING[name]
    is_value = not isinstance(thing, type) and not is_function(thing)  # its module's docstring describes it
    assert whole or listed or is_value, f"{name} is missing in docs/reference"


def test_class_has_example() -> None:
    assert ">>> " in (CUDAFuture.__doc__ or "")


def with_examples() -> dict[str, Any]:
    """Return what has examples of its own: methods of a ProcessGroup have those of the functions."""
    found: dict[str, Any] = {}
    known: set[str] = set()
    for name, thing in EVERYTHING.items():
        text = getattr(thing, "__doc__", "") or ""
        if ">>> " in text and text not in known:
            known.add(text)
            found[name] = thing
    return found


WITH_EXAMPLES = with_examples()
OF_TWO = {name for name, thing in WITH_EXAMPLES.items() if thing in [getattr(distributed, f) for f in FOR_TWO]}


def names_for(name: str) -> dict[str, Any]:
    """Return what the examples of a public name take for granted: torch, and the names of its module."""
    thing = WITH_EXAMPLES[name]
    if name.startswith(sim.__name__):
        return {"sim": sim, "torch": torch}
    if isinstance(thing, type):
        return {"torch": torch} | vars(NAMES[name][1])
    function = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
    return {"torch": torch} | getattr(function, "__globals__", {})


def report_on(name: str, rpc: Callable[[], object], backend: str = "") -> str:
    """Run the examples of a public name; return what was wrong, or nothing."""
    if name.startswith("rpc_ext.") and name.rpartition(".")[2] not in WITHOUT_A_SESSION:
        rpc()
    return run_examples(WITH_EXAMPLES[name].__doc__, name, names_for(name), backend=backend)


# Examples that need fake devices of CUDA: tests/fakecuda runs them.
OF_FAKECUDA = {name for name in WITH_EXAMPLES if name.startswith("cudafuture.testing.fakecuda.")}


HERE = [name for name in WITH_EXAMPLES if name not in OF_TWO | OF_FAKECUDA]

# Compiled examples show their values at their end, when the list that `call_at_end` shows has changed.
NEEDS_GRADIENTS = re.compile("grad|backward")
COMPILED = [
    name for name in HERE if not name.startswith("cudafuture.testing.") and name != "rpc_ext.session.call_at_end"
]


@pytest.mark.parametrize("name", HERE)
def test_examples_of_docstring_run(name: str, group: None, rpc: Callable[[], object]) -> None:
    assert not report_on(name, rpc)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")  # of the compiler
@pytest.mark.parametrize("backend", ["eager", "aot_eager"] if SOAK else ["aot_eager"])
@pytest.mark.parametrize("name", COMPILED)
def test_docstring_examples_run_in_compiled_functions(
    name: str, backend: str, group: None, rpc: Callable[[], object]
) -> None:
    assert not report_on(name, rpc, backend)


@pytest.mark.parametrize("name", [name for name in COMPILED if not NEEDS_GRADIENTS.search(WITH_EXAMPLES[name].__doc__)])
def test_docstring_examples_run_in_inference_mode(name: str, group: None, rpc: Callable[[], object]) -> None:
    with torch.inference_mode():
        assert not report_on(name, rpc)


@pytest.mark.slow
@pytest.mark.xdist_group("world")
@pytest.mark.world(2)
def test_two_rank_examples_run(world: World) -> None:
    def run() -> list[str]:
        names = {"dist": dist, "torch": torch} | vars(distributed)
        return [run_examples(names[name].__doc__, name, dict(names)) for name in sorted(FOR_TWO)]

    assert len(OF_TWO) == len(FOR_TWO)
    assert world.run(run) == [[""] * len(FOR_TWO)] * 2


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_examples_of_module_run(module: ModuleType, group: None) -> None:
    report = run_examples(module.__doc__ or "", module.__name__, dict(vars(module)))
    assert not report, report


def test_no_example_is_passed_over() -> None:
    run = [inspect.cleandoc(thing.__doc__) for thing in (*WITH_EXAMPLES.values(), *public_modules()) if thing.__doc__]
    gc.collect()  # see parity.answered()
    for file in [file for package in ("cudafuture", "rpc_ext") for file in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                assert ">>> " not in text or text in run, f"an example in {file} is of no public name"


def test_native_class_is_covered() -> None:
    assert {"cudafuture.future.CUDAFuture.wait", "cudafuture.future.CUDAFuture.then_async"} <= WITH_EXAMPLES.keys()
    assert {"cudafuture.future.CUDAFuture.events", "cudafuture.EventView.query"} <= EVERYTHING.keys()
