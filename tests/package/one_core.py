"""A script: loads the two native modules in the order of its arguments, and checks that there is one core."""

import ctypes
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch  # noqa: F401  # its libraries are loaded first

# A function of the interface, and the type of an exception that crosses the border.
SYMBOLS = "_ZN10cudafuture3api14call_elsewhereESt8functionIFvvEE", "_ZTIN10cudafuture3api7FailureE"


def main(folder: Path, names: list[str]) -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    files = {name: folder / name / f"_C{suffix}" for name in names}
    addresses: list[list[int | None]] = []
    for name, file in files.items():
        loader = importlib.machinery.ExtensionFileLoader(f"{name}._C", str(file))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        loader.exec_module(importlib.util.module_from_spec(spec))
    for file in files.values():
        library = ctypes.CDLL(str(file), mode=ctypes.RTLD_LOCAL)  # searches the file and the ones that it is linked to
        addresses.append([ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in SYMBOLS])
    assert addresses[0] == addresses[1], addresses
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if f"_C{suffix}" in line}
    expected = {str(file.resolve()) for file in files.values()}
    assert {name for name in mapped if Path(name).parent.name in names} == expected, mapped


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
