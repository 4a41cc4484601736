"""Members of an archive that are images by their names or first bytes; all others are ignored."""

from __future__ import annotations

import posixpath
import re

__all__ = ["FIRST_BYTES", "is_image_name", "is_image_start", "is_of_the_system"]

FIRST_BYTES = 16  # of a member, which `is_image_start` needs
_IMAGES = re.compile(
    r"\.(jpe?g|jpe|jfif|a?png|webp|bmp|dib|gif|tiff?|p[bgpn]m|pfm|avifs?|jp2|j2[kc]|jpc|jp[fx])", re.IGNORECASE
)
_STARTS = re.compile(
    rb"\xff\xd8\xff|\x89PNG|RIFF....WEBP|BM|GIF8|II[*+]\0|MM\0[*+]|P[1-6Ff]\s|....ftyp(avi[fs]|mif1|msf1)"
    rb"|\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    re.DOTALL,
)


def is_of_the_system(name: str) -> bool:
    """Return True for the files that macOS adds to archives, whatever their extensions are."""
    return posixpath.basename(name).startswith("._") or "__MACOSX" in name.split("/")


def is_image_name(name: str) -> bool:
    """Return True if the extension of a name is that of one of the formats of images."""
    return _IMAGES.fullmatch(posixpath.splitext(name)[1]) is not None


def is_image_start(data: bytes) -> bool:
    """Return True if a file with these first bytes has one of the formats of images."""
    return _STARTS.match(data) is not None
