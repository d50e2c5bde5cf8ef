"""Reading parts of a file straight to where they are used, many at a time and past the page cache."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from ..errors import NativeError
from .paging import PAGE

log = logging.getLogger(__name__)


class DirectFile:
    """A file open for reading past the page cache, or through it where the file system allows nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_direct = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._direct_fd = -1
            try:
                self._direct_fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back()
        except OSError as error:
            raise NativeError(f"{path}: cannot be opened: {error.strerror}") from error

    def _fall_back(self) -> None:
        log.debug("%s: its file system has no direct reads", self.path)
        self.is_direct = False

    def read_to(self, address: int, offset: int, n_bytes: int) -> None:
        """Read bytes ``[offset, offset + n_bytes)`` to ``address``.

        Address and offset must be at the same place in their pages. All pages they touch are read as a whole,
        so what lies around the bytes in memory is read again too, and must be what the file has there.
        Raises: NativeError if the file cannot be read, or has become too short.
        """
        before = offset % PAGE
        assert address % PAGE == before
        start, wanted = offset - before, before + n_bytes
        memory = (ctypes.c_uint8 * (-(-wanted // PAGE) * PAGE)).from_address(address - before)
        view = memoryview(memory)
        done = 0
        while done < wanted:
            try:
                n_read = self._read(view[done:], start + done)
            except OSError as error:
                raise NativeError(
                    f"{self.path}: cannot be read at byte {start + done:,}: {error.strerror}"
                ) from error
            done += n_read
            if done < wanted and n_read % PAGE or n_read == 0:
                raise NativeError(
                    f"{self.path}: the file ends at byte {start + done:,}, inside a tensor.",
                    hint="It was changed while it was in use. Load it again.",
                )

    def _read(self, view: memoryview, offset: int) -> int:
        if self.is_direct:
            try:
                return os.preadv(self._direct_fd, [view], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back()
        n_read = os.preadv(self._fd, [view], offset)
        # the page cache must not grow at the cost of what is resident
        os.posix_fadvise(self._fd, offset, n_read, os.POSIX_FADV_DONTNEED)
        return n_read

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``[offset, offset + n_bytes)`` of a file to ``address`` (see ``DirectFile.read_to``)."""

    file: DirectFile
    address: int
    offset: int
    n_bytes: int


class Batch:
    """Reads that were started together. ``wait`` for them before what they fill is used, or given back."""

    def __init__(self, reads: Sequence[Read]) -> None:
        self.reads = reads
        self.error: Exception | None = None
        self._left = len(reads)
        self._lock = threading.Lock()
        self._all_done = threading.Lock()
        if reads:
            self._all_done.acquire()

    def done(self, error: Exception | None = None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left == 0:
                self._all_done.release()

    def wait(self) -> None:
        """Wait for all of them. Raises: the first error among them, when none is under way any more."""
        with self._all_done:
            pass
        if self.error is not None:
            raise self.error


class Readers:
    """Threads that read; nearly all of their time is spent in the kernel, without the interpreter lock."""

    def __init__(self, n_threads: int) -> None:
        self._queue: SimpleQueue[tuple[Batch, Read] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"ggufmoe-read-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, reads: Sequence[Read]) -> Batch:
        batch = Batch(reads)
        for read in reads:
            self._queue.put((batch, read))
        return batch

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            batch, read = job
            try:
                read.file.read_to(read.address, read.offset, read.n_bytes)
                batch.done()
            except Exception as error:  # raised again where the batch is waited for
                batch.done(error)

    def close(self) -> None:
        """End the threads after the reads that were started."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
