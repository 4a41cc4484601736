"""Folder of programs that takes the place of PATH for a script: a few real ones, and Pythons that only answer."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["make_programs"]


def make_programs(folder: Path, names: tuple[str, ...], pythons: str, python: str) -> Path:
    """Make the folder ``bin`` with links to programs, and for each version in `pythons` the script `python`."""
    programs = folder / "bin"
    programs.mkdir()
    for version in pythons.split():
        path = programs / f"python{version}"
        path.write_text(python)
        path.chmod(0o755)
    for name in names:
        program = shutil.which(name)
        assert program is not None, f"{name} is missing"
        (programs / name).symlink_to(program)
    return programs
