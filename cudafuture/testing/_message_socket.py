"""Socket for messages of bytes between a test and its workers, over a pair of sockets."""

from __future__ import annotations

import socket
import struct

__all__ = ["MessageSocket"]

_LENGTH = struct.Struct("!Q")


class MessageSocket:
    """One end of a pair of sockets. Every message arrives whole, or not at all."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Send a message; raise OSError if the other end is closed."""
        self._end.sendall(_LENGTH.pack(len(message)))
        self._end.sendall(message)

    def receive(self) -> bytes:
        """Wait for the next message; raise EOFError if the other end is closed, even in the middle of one."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        self._end.close()

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            try:
                count = self._end.recv_into(rest)
            except ConnectionError:
                count = 0
            if count == 0:
                raise EOFError("the other end of the connection is closed")
            rest = rest[count:]
        return bytes(data)
