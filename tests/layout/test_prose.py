"""The English that a review overlooks: how docstrings begin, and words that hide the subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from layout.tree import (
    NATIVE,
    ROOT,
    c10d_files,
    cpp_files,
    cpp_test_files,
    machine_files,
    python_files,
    rpc_files,
)

FOLDERS = ("cudafuture", "cudafuture_c10d", "rpc_ext")

PRODUCT = python_files(*FOLDERS)
OTHERS = python_files("tests", "examples", "tools")

# The docstrings of CUDAFuture.
NATIVE_DOCS = NATIVE / "bind" / "docs.h"

# The files that the rule about words holds for.
WITH_WORDS = [
    *PRODUCT,
    *cpp_files(),
    *c10d_files(),
    *rpc_files(),
    *machine_files(),
    *cpp_test_files(),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("README.md")),
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))),
    *python_files("examples", "tools"),
    *sorted((ROOT / "tools").glob("*.sh")),
]

OPENERS = re.compile(r"\s*(What|Who|Whoever|Whose|Why|How|Where|Which|Whether|When|Say whether)\b")

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

# "an" before a consonant, as a renamed class leaves it. The names of the other letters begin with a vowel: an RPC.
ARTICLES = re.compile(
    rf"\b[Aa]n{GAP}[^\w\s]*(?:[BCDGJKPQTVWYZbcdgjkpqtvwyz]|[FHLMNRSXfhlmnrsx][aeiou](?<!ho)(?<!he)|[Ss][ht])\w*"
)

# The verbs with which a function's docstring may begin. Add a verb if it is an imperative of the field.
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        abort accumulate acknowledge add admit allocate allow append apply ask await begin block build call cancel
        capture check clear close collect combine commit compare compile complete compute consume continue convert copy
        count create defer delete describe discard distribute divide do draw drop empty end enqueue enter evict fail
        fill find finish flush fork free gather give grow handle hold import insert interrupt issue join keep kill
        leave let load lock log look make map mark measure merge move multiply name normalise open order parse pass
        pickle prepare prevent print provide publish put queue raise read receive record reduce refuse register release
        remove rename repair replace request reset restore resume retrieve retry return run save scale scan seed select
        send set show skip split spend start step stop store submit suspend swap sync synchronize take transfer
        truncate undo unpack update use verify wait wake write yield
        """,
    )
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring in Python: of modules, classes, functions and values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def native_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each raw string in C++."""
    for found in re.finditer(r'R"\((.*?)\)"', source, re.DOTALL):
        yield source.count("\n", 0, found.start()) + 1, found[1]


def functions(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of each function and method in Python, but not of properties."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            if not decorators & {"property", "cached_property"}:
                yield node.body[0].lineno, text


def begins_with_question(text: str) -> bool:
    return OPENERS.match(text) is not None


def begins_with_imperative(text: str) -> bool:
    first = re.match(r"\s*([A-Z]\w*)", text)
    return first is not None and first[1].lower() in VERBS


def find_words(text: str) -> list[str]:
    """Return the lines of a text in which a word of WORDS begins, with the word."""
    return [
        f"{text.count(chr(10), 0, found.start()) + 1}: {' '.join(found[0].split())}" for found in WORDS.finditer(text)
    ]


def ids(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", [*PRODUCT, *OTHERS, NATIVE_DOCS], ids=ids)
def test_docstrings_begin_with_no_question_word(file: Path) -> None:
    texts = (native_docstrings if file == NATIVE_DOCS else docstrings)(file.read_text(encoding="utf-8"))
    wrong = [f"{line}: {text.strip()}" for line, text in texts if begins_with_question(text)]
    assert not wrong, "name the thing, or begin with a verb:\n" + "\n".join(wrong)


@pytest.mark.parametrize("file", PRODUCT, ids=ids)
def test_docstrings_of_functions_begin_with_an_imperative_verb(file: Path) -> None:
    texts = functions(file.read_text(encoding="utf-8"))
    wrong = [f"{line}: {text}" for line, text in texts if not begins_with_imperative(text)]
    assert not wrong, "begin with an imperative verb, such as those in VERBS:\n" + "\n".join(wrong)


@pytest.mark.parametrize("file", WITH_WORDS, ids=ids)
def test_texts_name_the_subject(file: Path) -> None:
    found = find_words(file.read_text(encoding="utf-8"))
    assert not found, f"name the subject (the caller, the store), or use the verb of the field: {found}"


@pytest.mark.parametrize("file", WITH_WORDS, ids=ids)
def test_article_fits_the_next_word(file: Path) -> None:
    assert [found[0] for found in ARTICLES.finditer(file.read_text(encoding="utf-8"))] == []


# ---- each rule can fail


def test_docstrings_of_every_kind_are_found() -> None:
    source = '''"""Module."""
LIMIT = 3
"""Limit."""
class Store:
    """Store."""
    @property
    def keys(self):
        """Keys."""
    async def read(self):
        """Read."""
'''
    assert {text for _, text in docstrings(source)} == {"Module.", "Limit.", "Store.", "Keys.", "Read."}
    assert list(functions(source)) == [(10, "Read.")]
    assert list(native_docstrings('\nconst char* name =\n    R"(Name (of it).)";')) == [(3, "Name (of it).")]
    assert len(list(native_docstrings(NATIVE_DOCS.read_text(encoding="utf-8")))) > 20


@pytest.mark.parametrize(
    ("text", "is_question"),
    [
        ("What is kept.", True),
        ("\n    Whoever waits.", True),
        ("Say whether it is open.", True),
        ("Whole pages.", False),
        ("Return what is kept.", False),
    ],
)
def test_a_question_word_is_found(text: str, is_question: bool) -> None:
    assert begins_with_question(text) == is_question


@pytest.mark.parametrize("text", ["Keeps tensors.", "Writing a file.", "The store of keys.", "read it", "What it is."])
def test_a_docstring_that_is_no_imperative_is_found(text: str) -> None:
    assert not begins_with_imperative(text)
    assert begins_with_imperative("Return the store.")


@pytest.mark.parametrize(
    "text",
    ["Whoever waits is woken.", "It would wait for\never.", "  # it lets\n    # go of it", "  // wait for\n  // ever."],
)
def test_a_word_that_hides_the_subject_is_found(text: str) -> None:
    assert find_words(text)
    assert not find_words("The caller waits: engine.let_go()")


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("use an [DiskStore](stores.md)", True),
        ("as in an\n    # store", True),
        ("an ``Sharded", True),
        ("an engine, an RPC, an `ncclComm_t`, an hour", False),
    ],
)
def test_an_article_that_does_not_fit_is_found(text: str, is_wrong: bool) -> None:
    assert bool(ARTICLES.search(text)) == is_wrong
