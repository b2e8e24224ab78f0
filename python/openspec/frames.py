"""Frames on a stream of bytes: a 4-byte little-endian length, and so many bytes of content."""

from __future__ import annotations

from openspec.errors import EngineError

MAX_FRAME_BYTES = 1 << 30
_HEADER_BYTES = 4


def frame(content: bytes) -> bytes:
    """The content as a frame."""
    return len(content).to_bytes(_HEADER_BYTES, "little") + content


class FrameSplitter:
    """Cuts a byte stream into the contents of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def has_part(self) -> bool:
        """Whether a frame has begun and not ended."""
        return len(self._buffer) > 0

    def feed(self, data: bytes) -> list[bytes]:
        """Contents that are complete with this data.

        Raises:
            EngineError: for a frame of impossible length.
        """
        self._buffer += data
        found: list[bytes] = []
        start = 0
        while (first := start + _HEADER_BYTES) <= len(self._buffer):
            num_bytes = int.from_bytes(self._buffer[start:first], "little")
            if num_bytes > MAX_FRAME_BYTES:
                raise EngineError(f"a frame of {num_bytes} bytes")
            if first + num_bytes > len(self._buffer):
                break
            found.append(bytes(self._buffer[first : first + num_bytes]))
            start = first + num_bytes
        del self._buffer[:start]
        return found
