"""Labelled images from tar archives, as datasets of torch."""

from cudafuture.data._iterator import ImageIterator
from cudafuture.data.classes import classes_of
from cudafuture.data.tgz_images import TgzImages
from cudafuture.graph_breaks import break_graphs

__all__ = ["TgzImages", "classes_of"]

break_graphs(ImageIterator, *map(globals().get, __all__))
