"""Adapters for the APIs of other libraries: each has their names, and does its work with this library's parts."""

__all__: list[str] = []
