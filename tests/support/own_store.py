"""The store of docs/own-store.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

from cudafuture.store import Store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-store.md"


def make_own_store() -> Store:
    """Return an empty store of the class in the first code block of the page."""
    block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    module = ModuleType("own_store")
    sys.modules[module.__name__] = module  # code of the page may look for its module
    exec(compile(block[1], PAGE.name, "exec"), vars(module))
    store: Store = module.DictStore()
    return store
