"""C's own FILE, for the one function of llama.cpp that takes it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import NativeError


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p)
    libc.fseek.restype, libc.fseek.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
    libc.fclose.restype, libc.fclose.argtypes = ctypes.c_int, (ctypes.c_void_p,)
    return libc


@contextmanager
def c_file(path: Path, offset: int) -> Iterator[int]:
    """A FILE* that is open for reading and stands at byte ``offset``; closed at the end of the block."""
    libc = _libc()
    file = libc.fopen(os.fsencode(path), b"rb")
    if not file:
        raise NativeError(f"{path}: cannot be opened: {os.strerror(ctypes.get_errno())}")
    try:
        if libc.fseek(file, offset, os.SEEK_SET) != 0:
            raise NativeError(f"{path}: cannot go to byte {offset:,}: {os.strerror(ctypes.get_errno())}")
        yield file
    finally:
        libc.fclose(file)
