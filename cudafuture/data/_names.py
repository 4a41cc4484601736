"""Members of an archive that are images by their names or first bytes; all others are ignored."""

from __future__ import annotations

import posixpath
import re

__all__ = ["FIRST_BYTES", "is_image_name", "is_image_start", "is_of_the_system", "is_other_name"]

FIRST_BYTES = 18  # of a member, which `is_image_start` needs
_IMAGES = re.compile(
    r"\.(jpe?g|jpe|jfif|a?png|webp|bmp|dib|gif|tiff?|p[bgpn]m|pfm|avifs?|jp2|j2[kc]|jpc|jp[fx])", re.IGNORECASE
)
# Text and source code can begin as an image does. Raw files of cameras are TIFF with a small preview.
_OTHERS = re.compile(
    r"\.([ct]sv|txt|text|md|markdown|rst|tex|bib|rtf|pdf|html?|xml|xsd|svg|jsonl?|ndjson|geojson|ya?ml|toml|ini|cfg|conf"
    r"|log|lst|list|names|labels|md5|sha\d*|pyi?|ipynb|r|jl|m|lua|sql|sh|bat|css|[jt]s|java|go|rs|[ch]|cpp|cc|hpp|proto"
    r"|hei[cf]s?|nef|nrw|cr2|arw|dng|orf|rw2|pef|srw)",
    re.IGNORECASE,
)
_STARTS = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|RIFF....WEBP|GIF8[79]a|II[*+]\0|MM\0[*+]|\0\0..ftyp(avi[fs]|mif1|msf1)"
    rb"|BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0"  # the size of the header at byte 14
    rb"|P[1-6]\s+(#|\d+\s+[#\d])"  # a comment, or the width and the height
    rb"|\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    re.DOTALL,
)


def is_of_the_system(name: str) -> bool:
    """Return True for the files that macOS adds to archives, whatever their extensions are."""
    return posixpath.basename(name).startswith("._") or "__MACOSX" in name.split("/")


def is_image_name(name: str) -> bool:
    """Return True if the extension of a name is that of one of the formats of images."""
    return _IMAGES.fullmatch(posixpath.splitext(name)[1]) is not None


def is_other_name(name: str) -> bool:
    """Return True if the extension of a name is that of text or of another format, whatever the first bytes are."""
    return _OTHERS.fullmatch(posixpath.splitext(name)[1]) is not None


def is_image_start(data: bytes) -> bool:
    """Return True if a file with these first bytes has one of the formats of images."""
    return _STARTS.match(data) is not None
