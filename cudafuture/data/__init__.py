"""Labelled images from tar archives, as datasets of torch."""

from cudafuture.data.classes import classes_of
from cudafuture.data.tgz_images import TgzImages

__all__ = ["TgzImages", "classes_of"]
