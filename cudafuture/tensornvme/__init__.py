"""TensorNVMe's API with futures: ``DiskOffloader``, ``AsyncFileWriter`` and their backends."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.tensornvme.async_file_writer import AsyncFileWriter
from cudafuture.tensornvme.backends import get_backends, probe_backend
from cudafuture.tensornvme.disk_offloader import DiskOffloader

__all__ = ["AsyncFileWriter", "DiskOffloader", "get_backends", "probe_backend"]

break_graphs(*map(globals().get, __all__))
