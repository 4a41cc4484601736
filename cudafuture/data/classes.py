"""Classes of an archive of labelled images."""

from __future__ import annotations

import contextlib
import os

from cudafuture.data._labels import scan_classes
from cudafuture.data._sidecar import DamagedSidecarError, read_sidecar
from cudafuture.data._tar import require_tar

__all__ = ["classes_of"]


def classes_of(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the folders that directly contain the images of an archive, sorted.

    The result depends only on the archive, so all ranks get the same one. An index beside the archive is used;
    otherwise the archive is unpacked once. Members in no folder, links, device files and members that are not
    images by name or first bytes have no class.

    Args:
        path: a .tar, .tgz (.tar.gz) or .tar.zst archive.

    Raises:
        ArchiveError: the archive is truncated, damaged or a decompression bomb, or is no tar archive.
        OSError: the archive cannot be read.

    >>> import io, tarfile
    >>> with tarfile.open("pets.tgz", "w:gz") as archive:
    ...     for name in ("train/dog/1.jpg", "train/cat/1.jpg"):
    ...         archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    >>> classes_of("pets.tgz")
    ['cat', 'dog']
    """
    archive = os.fspath(path)
    with contextlib.suppress(DamagedSidecarError, OSError):
        index = read_sidecar(archive)
        if index is not None:
            return list(index.classes)
    require_tar(archive)
    classes, fault = scan_classes(archive)
    if fault is not None:
        raise fault.error(archive) from fault
    return classes
