"""No two classes have the same name, except a C++ class and the Python class that is its face.

Counted are the classes of Python modules and functions, and those in C++ namespaces. A class inside another class is
named with its owner, and a forward declaration is none. Underscores at the beginning are no part of a name. The classes
that a public module of compat lists in ``__all__`` have the names of another library, and are not counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from layout.tree import (
    ROOT,
    c10d_files,
    cpp_files,
    interface_headers,
    machine_files,
    python_files,
    read_all,
    rpc_files,
)

# C++ folders, and the Python folder that has their faces. The most specific one counts.
FACES = {
    "cudafuture/_C/io": "cudafuture/io",
    "cudafuture/_C/store": "cudafuture/store",
    "cudafuture/testing/fakecuda": "cudafuture/testing/fakecuda",
    "cudafuture/testing/machine": "cudafuture/testing/machine",
    "cudafuture/testing/sim": "cudafuture/testing/sim",
    "rpc_ext/_C": "rpc_ext",
    "rpc_ext/_C/store": "rpc_ext/store",
}

NOT_CODE = re.compile(
    r"""//[^\n]*                                  # comments
      | /\*.*?\*/
      | R"(\w*)\(.*?\)\1"                         # strings and characters, but not the ' in 1'000
      | "(?:\\.|[^"\\\n])*"
      | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'
      | ^[ \t]*\#(?:\\\n|[^\n])*                  # lines of the preprocessor
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
NAMESPACE = re.compile(r"(?:inline\s+)?namespace\b[\w:\s]*|extern\s*")
ARGUMENTS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
CLASS = re.compile(
    rf"""(?:^|[\s>])(?:class|struct|union|enum)\s+
        (?:\w+\s+|\w+\s*{ARGUMENTS}\s*|\[\[[^]]*\]\]\s*)*?    # macros and attributes
        (?!(?:class|const|noexcept|override)\b)(\w+)(?:\s+final)?(?:\s*:[^:].*)?$
    """,
    re.DOTALL | re.VERBOSE,
)


def cpp_classes(text: str) -> Iterator[str]:
    """Yield the names of the classes, structs, unions and enums that a C++ file defines in namespaces."""
    opens_namespace: list[bool] = []  # of each open brace
    start = 0
    code = NOT_CODE.sub(" ", text)
    for mark in re.finditer(r"[{};]", code):
        head = code[start : mark.start()].strip()
        start = mark.end()
        if mark[0] == "}":
            opens_namespace.pop()
        elif mark[0] == "{":
            if all(opens_namespace) and (found := CLASS.search(head)):
                yield found[1]
            opens_namespace.append(NAMESPACE.fullmatch(head) is not None)


def python_classes(text: str) -> Iterator[str]:
    """Yield the names of the classes of a Python file that are in no other class."""
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef):
            yield node.name
        else:
            todo += ast.iter_child_nodes(node)


def room(file: str) -> str:
    """Return the folder of a Python file, or the Python folder that has the faces of a C++ file's classes."""
    if file.endswith(".py"):
        return file.rpartition("/")[0]
    return next((FACES[f] for f in sorted(FACES, key=len, reverse=True) if file.startswith(f"{f}/")), "")


def shared_names(classes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the files of each name that several classes have, from the name and the file of each class."""
    where: dict[str, list[str]] = {}
    for name, file in classes:
        where.setdefault(name.lstrip("_"), []).append(file)
    return {name: files for name, files in where.items() if len(files) > 1 and not is_face(files)}


def is_face(files: list[str]) -> bool:
    """Return True if the files are one of Python and one of C++, in the same room."""
    return len(files) == 2 and len([f for f in files if f.endswith(".py")]) == 1 and room(files[0]) == room(files[1])


def classes_of(file: Path) -> list[tuple[str, str]]:
    text = file.read_text(encoding="utf-8")
    where = file.relative_to(ROOT)
    exempt = names_of_others(where, text)
    names = python_classes if file.suffix == ".py" else cpp_classes
    return [(name, where.as_posix()) for name in names(text) if name not in exempt]


def names_of_others(file: Path, text: str) -> list[str]:
    """Return the names that a public module of compat lists, which another library has chosen."""
    if "compat" not in file.parts or re.match("_(?!_)", file.name):
        return []
    return read_all(ast.parse(text)) or []


def test_each_class_has_its_own_name() -> None:
    python = python_files("cudafuture", "rpc_ext")
    native = [*cpp_files(), *c10d_files(), *machine_files(), *rpc_files()]
    native = [f for f in native if f not in interface_headers()]  # whose classes have the names of what they stand for
    found = {kind: [c for f in files for c in classes_of(f)] for kind, files in (("py", python), ("cpp", native))}
    assert len(found["py"]) > 200
    assert len(found["cpp"]) > 300
    assert shared_names([*found["py"], *found["cpp"]]) == {}


@pytest.mark.parametrize(
    ("first", "second", "is_allowed"),
    [
        ("cudafuture/io/engine.py", "cudafuture/_C/io/engine.h", True),
        ("rpc_ext/_destination.py", "rpc_ext/_C/destination.h", True),
        ("rpc_ext/store/_wire.py", "rpc_ext/_C/store/wire/message.h", True),
        ("rpc_ext/_call.py", "rpc_ext/_C/store/wire/message.h", False),  # another room
        ("rpc_ext/session.py", "cudafuture/_C/io/engine.h", False),
        ("cudafuture/future.py", "cudafuture/_C/core/future.h", False),  # the core has no faces
        ("cudafuture/io/engine.py", "cudafuture/io/file.py", False),  # one language
        ("cudafuture/_C/io/engine.h", "cudafuture/_C/io/file.h", False),
        ("cudafuture/io/file.py", "cudafuture/io/file.py", False),  # one file
    ],
)
def test_shared_name_is_found_unless_a_face(first: str, second: str, is_allowed: bool) -> None:
    found = shared_names([("Same", first), ("Other", first), ("Same", second)])
    assert found == ({} if is_allowed else {"Same": [first, second]})


def test_underscore_makes_no_other_name() -> None:
    assert shared_names([("_File", "rpc_ext/a.py"), ("File", "rpc_ext/b.py")]) == {
        "File": ["rpc_ext/a.py", "rpc_ext/b.py"]
    }


def test_compat_is_exempt_for_the_names_of_public_modules() -> None:
    text = '__all__ = ["Batch"]\nclass Batch: ...\nclass Other: ...'
    assert names_of_others(Path("cudafuture/compat/library/batch.py"), text) == ["Batch"]
    assert names_of_others(Path("cudafuture/compat/library/_batch.py"), text) == []
    assert names_of_others(Path("cudafuture/pipeline/batch.py"), text) == []


def test_third_class_of_a_name_is_found() -> None:
    files = ["cudafuture/io/file.py", "cudafuture/_C/io/file.h", "cudafuture/_C/io/engine.cpp"]
    assert shared_names([("File", f) for f in files]) == {"File": files}


def test_cpp_classes_are_those_in_namespaces() -> None:
    text = """
        #define OPEN {
        namespace a::b {
        class Forward;
        template <class T, int N = 1'000>
        struct Template final : std::vector<T> { struct Nested {}; const char* brace = "{"; char quote = '{'; };
        // class Comment {
        enum class Kind : int { one };
        namespace { class alignas(64) Local { void call() { struct Inner {}; } }; }
        void function(Forward& of) { struct Variable {} variable; }
        }
        extern "C" { struct Plain {}; }
        class EXPORT Exported : public Base {};
        struct __attribute__((visibility("default"))) [[nodiscard]] Attributed final {};
        struct stat status() const {}
        class After {};
    """
    names = ["Template", "Kind", "Local", "Plain", "Exported", "Attributed", "After"]
    assert list(cpp_classes(text)) == names


def test_python_classes_are_those_in_no_class() -> None:
    text = "class A:\n    class B: ...\n    def f(self):\n        class C: ...\nif x:\n    class D: ...\n"
    assert sorted(python_classes(text + "def f():\n    class E: ...\n")) == ["A", "D", "E"]
