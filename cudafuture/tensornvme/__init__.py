"""TensorNVMe's API with futures: ``DiskOffloader``, ``AsyncFileWriter`` and their backends."""

from cudafuture.tensornvme.async_file_writer import AsyncFileWriter
from cudafuture.tensornvme.backends import get_backends, probe_backend
from cudafuture.tensornvme.disk_offloader import DiskOffloader

__all__ = ["AsyncFileWriter", "DiskOffloader", "get_backends", "probe_backend"]
