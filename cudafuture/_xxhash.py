"""XXH3 for the native core: from the library that the package ``xxhash`` bundles or links."""

from __future__ import annotations

import ctypes
import functools

from cudafuture import _C

__all__ = ["install"]


@functools.cache
def install() -> None:
    """Give the core the address of XXH3.

    Raises:
        ImportError: the package's library does not export it.
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
