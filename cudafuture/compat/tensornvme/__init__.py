"""TensorNVMe's API with futures: ``DiskOffloader``, ``AsyncFileWriter`` and their backends."""

from cudafuture.compat.tensornvme.async_file_writer import AsyncFileWriter
from cudafuture.compat.tensornvme.backends import get_backends, probe_backend
from cudafuture.compat.tensornvme.disk_offloader import DiskOffloader
from cudafuture.graph_breaks import break_graphs

__all__ = ["AsyncFileWriter", "DiskOffloader", "get_backends", "probe_backend"]

break_graphs(*map(globals().get, __all__))
