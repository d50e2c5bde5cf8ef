"""Model files mapped into memory, for the bytes of single experts."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np


class MappedFile:
    """A file mapped read-only. ``address(offset)`` is valid until ``close``."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, np.uint8)
        self._base: int = self._bytes.ctypes.data

    def address(self, offset: int) -> int:
        """Where byte ``offset`` of the file is in memory."""
        return self._base + offset

    def close(self) -> None:
        self._bytes = None
        self._map.close()
