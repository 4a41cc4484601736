"""The xxHash library, for the native core: the one that the package ``xxhash`` carries, or is linked with."""

from __future__ import annotations

import ctypes
import functools

from cudafuture import _C

__all__ = ["install"]


@functools.cache
def install() -> None:
    """Show the core where XXH3 is.

    Raises:
        ImportError: the package's library does not offer it.
    """
    import xxhash

    library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
    try:
        function = library.XXH3_64bits_withSeed
    except AttributeError:
        raise ImportError(f"xxhash {xxhash.VERSION} does not export XXH3; install it from PyPI") from None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    _C.set_hash(address)
