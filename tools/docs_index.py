"""Index page of the docs of all versions.

    python tools/docs_index.py FOLDER

FOLDER has a folder for each version, such as 0.2.0. FOLDER/index.html lists them, the newest first. FOLDER/latest.html
leads to the newest version that is no pre-release, or to the newest of all.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

HEAD = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>cudafuture</title>{}</head><body>\n'


def versions_in(folder: Path) -> dict[Version, str]:
    """Return the versions whose docs are in a folder, the newest first, each with the name of its folder."""
    found = []
    for page in folder.glob("*/index.html"):
        try:
            found.append((Version(page.parent.name), page.parent.name))
        except InvalidVersion:
            continue
    return dict(sorted(found, reverse=True))


def write_index(folder: Path) -> dict[Version, str]:
    """Write both pages, and return the versions."""
    versions = versions_in(folder)
    if versions:
        rows = "".join(f'<li><a href="{name}/index.html">{each}</a></li>\n' for each, name in versions.items())
        page = f"{HEAD.format('')}<h1>Documentation of cudafuture</h1>\n<ul>\n{rows}</ul>\n</body></html>\n"
        (folder / "index.html").write_text(page, encoding="utf-8")
        newest = [name for each, name in versions.items() if not each.is_prerelease] or list(versions.values())
        latest = newest[0]
        refresh = f'<meta http-equiv="refresh" content="0; url={latest}/index.html">'
        link = f'<p><a href="{latest}/index.html">cudafuture {latest}</a></p>\n</body></html>\n'
        (folder / "latest.html").write_text(HEAD.format(refresh) + link, encoding="utf-8")
    return versions


if __name__ == "__main__":
    written = write_index(Path(sys.argv[1]))
    print(*written, sep="\n")
    sys.exit(not written)
