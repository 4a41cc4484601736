"""Index pages for the wheels of cudafuture, one folder for each minor version of torch.

    python tools/wheel_index.py FOLDER < ADDRESSES

The input has one address or path of a wheel on each line; other lines are ignored. FOLDER/torch-2.13/index.html lists
the wheels with the label torch213, and so on, for ``pip install cudafuture --find-links FOLDER/torch-2.13/``. No page
lists the wheels of two minor versions: pip would take the newest label, and replace the installed torch.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

_WHEEL = re.compile(r"cudafuture-[^-/]+\+torch(\d)(\d+)-[^/]*\.whl")


def sort_addresses(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Return the addresses of wheels by the folder that each belongs to."""
    folders: dict[str, list[str]] = {}
    for address in addresses:
        if found := _WHEEL.fullmatch(file_name(address)):
            folders.setdefault(f"torch-{found[1]}.{found[2]}", []).append(address)
    return folders


def file_name(address: str) -> str:
    """Return the name of a wheel, in which an address replaces the plus sign."""
    return unquote(address.rpartition("/")[2])


def page_of(folder: str, addresses: Iterable[str]) -> str:
    """Return the page of one folder."""
    rows = (f'<a href="{html.escape(each)}">{html.escape(file_name(each))}</a><br>' for each in sorted(addresses))
    head = f"<!DOCTYPE html>\n<html><head><title>cudafuture, {folder}</title></head><body>"
    return "\n".join([head, *rows, "</body></html>\n"])


def write_pages(root: Path, addresses: Iterable[str]) -> list[Path]:
    """Write the page of each folder below `root`; return the pages."""
    pages = []
    for folder, found in sorted(sort_addresses(addresses).items()):
        page = root / folder / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(page_of(folder, found), encoding="utf-8")
        pages.append(page)
    return pages


if __name__ == "__main__":
    written = write_pages(Path(sys.argv[1]), (line.strip() for line in sys.stdin))
    print(*written, sep="\n")
    sys.exit(not written)
