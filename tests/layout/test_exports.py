"""The built module exports its init function and the interface that ``cudafuture/_C/api`` declares, nothing else."""

from __future__ import annotations

import re
import subprocess

import cudafuture._C
from layout.tree import interface_headers

CLASS = re.compile(r"class CUDAFUTURE_API (\w+)")
FUNCTION = re.compile(r"^CUDAFUTURE_API [^(;]*?(\w+)\(", re.MULTILINE)
SYMBOL = re.compile(r"(?:(?:typeinfo(?: name)?|vtable) for )?cudafuture::api::(\w+)")


def exported() -> list[str]:
    """Return the demangled names of the symbols that the module exports."""
    command = ["nm", "--dynamic", "--defined-only", "--demangle", str(cudafuture._C.__file__)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def test_module_exports_its_interface_alone() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in interface_headers())
    classes, functions = set(CLASS.findall(text)), set(FUNCTION.findall(text))
    assert {"Failure", "Store", "Targets"} <= classes
    assert {"store_of", "make_promise", "digest_of"} <= functions
    found = set()
    for symbol in exported():
        if symbol != "PyInit__C":
            match = SYMBOL.match(symbol)
            assert match is not None, f"{symbol} is exported"
            found.add(match[1])
    assert found - classes == functions
    assert found - functions <= classes
