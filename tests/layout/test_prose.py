"""The English of docstrings, comments and pages: a noun phrase for a thing, an imperative verb for a function."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from layout.tree import NATIVE, ROOT, cpp_files, cpp_test_files, fakecuda_files, python_files, rpc_files, sim_files

# Every rule holds for the Python files of these folders.
FOLDERS = ("cudafuture", "rpc_ext")

# The rule about words holds for these pages too.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

FILES = python_files(*FOLDERS)

# The rule about words holds for these files of C++ too, and for the pages beside them.
NATIVE_FILES = [
    *cpp_files(),
    *rpc_files(),
    *sim_files(),
    *fakecuda_files(),
    *cpp_test_files(),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("README.md")),
]

# The docstrings of CUDAFuture.
NATIVE_DOCS = NATIVE / "bind" / "docs.h"

OPENERS = re.compile(r"(What|Who|Whoever|Whose|How|Where|Which|Whether|When|Say whether)\b")

# Words that hide the subject, or that the field does not use. A line break, also in a comment, may divide them.
GAP = r"\s+(?:(?:#|//)\s*)?"
WORDS = re.compile(
    r"\b(?:whoever|whomever|somebody|someone|anybody|anyone|nobody"
    + "".join(
        "|" + phrase.replace(" ", GAP)
        for phrase in (
            "no one",
            "(?:is|are|was|were) wanted",
            "for ever",
            "lets? go(?: of)?",
            "(?:has|have) come",
            "hears? of",
            "(?:is|are) told",
            "under way",
            "no longer to be had",
        )
    )
    + r")\b",
    re.IGNORECASE,
)

# The verbs with which a function's docstring may begin. Add a verb if it is an imperative of the field.
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        abort accumulate acknowledge add admit allocate allow append apply await begin block build call cancel capture
        check clear close collect commit compare compile complete compute continue convert copy count create defer
        delete describe discard distribute divide do draw drop empty end enqueue enter evict fail fill find finish flush
        free gather give grow handle hold import insert issue join keep kill leave let load lock log look make map mark
        merge move multiply normalise open order parse pass pickle prepare prevent provide publish put queue raise
        read receive record reduce refuse register release remove rename repair replace request reset restore resume
        retrieve retry return run save scale scan seed select send set show skip split spend start step stop store
        submit suspend swap sync synchronize take transfer truncate undo unpack update use verify wait wake write
        yield
        """,
    )
)

# After one of these words a verb that is also a noun, such as "copy" or "reads", begins a noun phrase.
CONNECTIVES = frozenset(
    re.findall(
        r"\w+",
        """
        after and around as at before behind beside between by for from in inside into of on or outside over since
        that through to under until which whose with without
        """,
    )
)

# The constants of NATIVE_DOCS that document the class and its properties. All others document functions.
NATIVE_THINGS = frozenset({"future", "devices", "events", "priority", "name", "late_error", "released"})


class Text(NamedTuple):
    """Docstring of a file, with the line and the kind of its owner."""

    file: Path
    line: int
    kind: str  # "thing" (module, class, property), "function" or "value"
    name: str
    text: str

    def __str__(self) -> str:
        place = self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file
        return f"{place}:{self.line}: {self.name}: {self.text.strip().splitlines()[0]}"


def docstrings(source: str, file: Path) -> Iterator[Text]:
    """Yield the docstrings of a file: of its module, classes, functions and values."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                is_thing = isinstance(node, ast.Module | ast.ClassDef) or _is_property(node)
                kind = "thing" if is_thing else "function"
                yield Text(file, node.body[0].lineno, kind, getattr(node, "name", "the module"), text)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                yield from _values(body, file)


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) -> bool:
    names = [ast.unparse(each).rpartition(".")[2] for each in getattr(node, "decorator_list", [])]
    return any(name in ("property", "cached_property") for name in names)


def _values(body: list[ast.stmt], file: Path) -> Iterator[Text]:
    """Yield the strings that follow an assignment: they document its target."""
    for before, node in itertools.pairwise(body):
        if (
            isinstance(before, ast.Assign | ast.AnnAssign)
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            target = before.target if isinstance(before, ast.AnnAssign) else before.targets[0]
            yield Text(file, node.lineno, "value", ast.unparse(target), node.value.value)


def native_docstrings(source: str, file: Path) -> Iterator[Text]:
    """Yield the docstrings of a header of C++: its constants that are raw strings."""
    for found in re.finditer(r'const char\* (\w+) =\s*R"\((.*?)\)"', source, re.DOTALL):
        kind = "thing" if found[1] in NATIVE_THINGS else "function"
        yield Text(file, source.count("\n", 0, found.start()) + 1, kind, found[1], found[2])


def third_person(verb: str) -> str:
    """Return the third person singular of a verb."""
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in "aeiou" else verb + "s"


THIRD_PERSON = frozenset(map(third_person, VERBS))


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\s.,:;()]+", text.strip())


def begins_with_question(text: str) -> bool:
    return OPENERS.match(text.strip()) is not None


def begins_with_imperative(text: str) -> bool:
    return words_of(text)[0] in {verb.capitalize() for verb in VERBS}


def is_noun_phrase(text: str) -> bool:
    """Return False if a text begins with a question word, or with a verb that takes an object."""
    if begins_with_question(text):
        return False
    first, second = [*words_of(text), "", ""][:2]
    if first.lower() in {"this", "it", "they", "here", "there"}:
        return False
    if first.lower() in VERBS or first.lower() in THIRD_PERSON:
        is_alone = re.match(r"\s*\S+\s*[.:,]", text) is not None
        return is_alone or not second or second in CONNECTIVES
    return not re.match(r"[A-Z][a-z]+ing (?:an?|the|each|every|all)\b", text)


NATIVE_TEXTS = list(native_docstrings(NATIVE_DOCS.read_text(encoding="utf-8"), NATIVE_DOCS))

TEXTS = [text for file in FILES for text in docstrings(file.read_text(encoding="utf-8"), file)] + NATIVE_TEXTS


def test_docstrings_begin_with_no_question_word() -> None:
    wrong = [str(text) for text in TEXTS if begins_with_question(text.text)]
    assert not wrong, "name the thing, or begin with a verb:\n" + "\n".join(wrong)


def test_docstrings_of_modules_classes_and_properties_are_noun_phrases() -> None:
    wrong = [str(text) for text in TEXTS if text.kind == "thing" and not is_noun_phrase(text.text)]
    assert not wrong, "begin with a noun phrase that says what the thing is:\n" + "\n".join(wrong)


def test_docstrings_of_functions_begin_with_an_imperative_verb() -> None:
    wrong = [str(text) for text in TEXTS if text.kind == "function" and not begins_with_imperative(text.text)]
    assert not wrong, "begin with an imperative verb, such as those in VERBS:\n" + "\n".join(wrong)


def found_words(text: str) -> list[str]:
    """Return the lines of a text in which a word of WORDS begins, with the word."""
    return [
        f"{text.count(chr(10), 0, found.start()) + 1}: {' '.join(found[0].split())}" for found in WORDS.finditer(text)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_sources_name_the_subject(file: Path) -> None:
    found = found_words(file.read_text(encoding="utf-8"))
    assert not found, "name the subject (the caller, the store, the device), or use the verb of the field: " + str(
        found
    )


@pytest.mark.parametrize("file", NATIVE_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_native_sources_name_the_subject(file: Path) -> None:
    found = found_words(file.read_text(encoding="utf-8"))
    assert not found, "name the subject (the caller, the store, the device), or use the verb of the field: " + str(
        found
    )


def questions(source: str) -> list[str]:
    """Return the first lines of the comments of a C++ file that begin with a question word."""
    lines = ["", *map(str.strip, source.splitlines())]
    comments = [
        line.removeprefix("//")
        for before, line in itertools.pairwise(lines)
        if line.startswith("//") and not before.startswith("//")
    ]
    return [text for text in comments if begins_with_question(text) and not text.strip().startswith("When ")]


def test_native_comments_begin_with_no_question_word() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {text}"
        for file in NATIVE_FILES
        for text in questions(file.read_text(encoding="utf-8"))
    ]
    assert not wrong, "name the thing, or begin with a verb:\n" + "\n".join(wrong)


def native_test_names(source: str) -> list[str]:
    """Return the names of the doctest cases and subcases of a C++ file."""
    return re.findall(r'(?:TEST_CASE|TEST_CASE_FIXTURE|SUBCASE)\(\s*(?:\w+,\s*)?"((?:\\.|[^"\\])*)"', source)


def hides_subject(name: str) -> bool:
    """Return True if the name of a test case, after its prefix, begins with a question word or with "it"."""
    return (
        re.match(r"(?:[\w -]+: )?(?:what|who|whoever|whose|how|where|which|whether|it|its|they|that)\b", name)
        is not None
    )


def test_native_test_names_have_a_subject() -> None:
    names = [name for file in cpp_test_files() for name in native_test_names(file.read_text(encoding="utf-8"))]
    wrong = [name for name in names if hides_subject(name)]
    assert len(names) > 400
    assert not wrong, "begin with the subject whose behaviour is tested:\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_the_subject(page: Path) -> None:
    found = found_words(page.read_text(encoding="utf-8"))
    assert not found, "name the subject, or use the verb of the field: " + str(found)


# ---- each rule can fail


def test_the_native_files_are_found() -> None:
    assert {file.suffix for file in NATIVE_FILES} == {".h", ".cpp", ".md"}
    assert {text.name for text in NATIVE_TEXTS} >= NATIVE_THINGS | {"wait", "then"}
    assert len(NATIVE_TEXTS) == NATIVE_DOCS.read_text(encoding="utf-8").count("const char*")


def test_docstrings_of_cpp_are_found() -> None:
    source = """
inline constexpr const char* name = R"(Name of it.

More.)";

inline constexpr const char* wait =
    R"(Whether it waits (or not).)";
"""
    texts = list(native_docstrings(source, Path("docs.h")))
    assert [(text.line, text.kind, text.text) for text in texts] == [
        (2, "thing", "Name of it.\n\nMore."),
        (6, "function", "Whether it waits (or not)."),
    ]


def kinds_of(source: str) -> list[tuple[str, str]]:
    return [(text.kind, text.text) for text in docstrings(source, Path("example.py"))]


def test_docstrings_of_every_kind_are_found() -> None:
    source = '''"""Module."""
LIMIT = 3
"""Limit."""
class Store:
    """Store of keys."""
    size: int
    """bytes"""
    @property
    def keys(self):
        """The keys."""
    async def read(self):
        """Read a key."""
        if True:
            x = 1
            """value"""
'''
    assert sorted(kinds_of(source)) == sorted(
        [
            ("thing", "Module."),
            ("value", "Limit."),
            ("thing", "Store of keys."),
            ("value", "bytes"),
            ("thing", "The keys."),
            ("function", "Read a key."),
            ("value", "value"),
        ]
    )


@pytest.mark.parametrize(
    "text", ["What is kept.", "Whoever waits.", "How many there are.", "Where it lies.", "Say whether it is open."]
)
def test_a_question_word_is_found(text: str) -> None:
    assert begins_with_question(text)
    assert not is_noun_phrase(text)


def test_a_comment_that_begins_with_a_question_word_is_found() -> None:
    source = "// What it is.\n#pragma once\n\n  // Reads it.\n  // What remains is kept.\nint x;\n  // Who reads it.\n"
    assert questions(source) == [" What it is.", " Who reads it."]
    assert not questions("int x;  // the queue\n// When it is full, reads block.\n")


def test_names_of_native_tests_are_found() -> None:
    source = """
TEST_CASE("store: a key is read") {
TEST_CASE_FIXTURE(
    Rules, "it waits") {
  SUBCASE("what a \\"key\\" is") {}
TEST_CASE("storage: what is written" * doctest::skip()) {
"""
    names = native_test_names(source)
    assert names == ["store: a key is read", "it waits", 'what a \\"key\\" is', "storage: what is written"]
    assert [hides_subject(name) for name in names] == [False, True, True, True]


@pytest.mark.parametrize("text", ["Whole pages.", "Statistics of a store.", "Whatsoever."])
def test_a_word_that_begins_like_a_question_word_is_allowed(text: str) -> None:
    assert not begins_with_question(text)


@pytest.mark.parametrize(
    "text",
    [
        "Keeps tensors on disk.",
        "Return the store.",
        "Copies batches to one device.",
        "Writing a file.",
        "The store of keys.",
        "What a store is.",
    ],
)
def test_a_docstring_that_is_no_imperative_is_found(text: str) -> None:
    assert begins_with_imperative(text) == (text == "Return the store.")


@pytest.mark.parametrize(
    "text",
    [
        "Keeps tensors on disk.",
        "Reads one iterator.",
        "Make a device current.",
        "Copying the batches.",
        "This is a store.",
        "Which shard has a key.",
    ],
)
def test_a_docstring_that_is_no_noun_phrase_is_found(text: str) -> None:
    assert not is_noun_phrase(text)


@pytest.mark.parametrize(
    "text",
    [
        "Store of keys.",
        "Copies that one call makes.",
        "Writes of tensors.",
        "Copy.",
        "True if it is open.",
        "The size.",
    ],
)
def test_a_noun_phrase_is_allowed(text: str) -> None:
    assert is_noun_phrase(text)


@pytest.mark.parametrize(
    "text",
    [
        "Whoever waits is woken.",
        "A number is wanted.",
        "It would wait for\never.",
        "x = 1  # it lets\n    # go of the memory",
        "  // it would wait for\n  // ever.",
        "Nobody reads it.",
        "The answer has come.",
        "The client hears of that.",
        "Writes that are under way.",
    ],
)
def test_a_word_that_hides_the_subject_is_found(text: str) -> None:
    assert found_words(text)


@pytest.mark.parametrize("text", ["The caller waits.", "engine.let_go()", "The outcome.", "a long-wanted feature"])
def test_other_words_are_allowed(text: str) -> None:
    assert not found_words(text)
