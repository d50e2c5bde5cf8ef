"""The bytes of a converted file: read once from front to back, checked, hashed, and written where they belong.

Memory is a few buffers of ``CHUNK_BYTES``, whatever the model's size. One thread reads and checks, one hashes,
one writes; where the file is reordered, it is the writes that jump.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import FormatError
from ..native.devices import type_numbers
from ..native.quantize import Quantizer, row_bytes
from .badblocks import FORMATS, ROUTER_NAME, count_bad
from .experts import EXPERT_NAME
from .imatrix import Importance
from .targets import Run, Target
from .writer import data_offsets

CHUNK_BYTES = 1 << 20  # small enough that what was read is hashed, checked and written from a cache
N_BUFFERS = 8


class BadBlocksFound(Exception):
    """A chunk of experts or of a router holds weights that are no numbers."""


class Sink(Protocol):
    """Where bytes go: into a file, or against one."""

    def put(self, offset: int, data: memoryview) -> None: ...


class FileWriter:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def put(self, offset: int, data: memoryview) -> None:
        while data:
            done = os.pwrite(self._fd, data, offset)
            offset, data = offset + done, data[done:]


class FileComparer:
    """Raises: FormatError at the first byte range that differs."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path

    def put(self, offset: int, data: memoryview) -> None:
        found = os.pread(self._fd, len(data), offset)
        if found != data:
            raise FormatError(
                f"{self._path}: what was written differs from the source at byte {offset:,} and on",
                hint="The disk or the memory is failing, or another program changed one of the files.",
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of a source file, and where it goes. ``matrix`` counts within ``target.matrices``."""

    run: Run
    destination: int
    target: Target
    matrix: int


def stream(
    paths: Sequence[Path],
    targets: Sequence[Target],
    sink: Sink,
    *,
    data_start: int,
    alignment: int,
    hashed: bool,
    checked: bool,
    quantizer: Quantizer | None = None,
    importance: Importance | None = None,
    advance: Callable[[int], None] = lambda _n_bytes: None,
) -> tuple[str, ...]:
    """Send the bytes of all targets to ``sink``, at their offsets from ``data_start`` on.

    ``advance`` is called with the number of source bytes just read.
    Returns: with ``hashed``, the SHA-256 of every source file; all of their bytes are read then.
    Raises: BadBlocksFound with ``checked``; FormatError if a source ends early; OSError if writing fails.
    """
    pieces = sorted(_pieces(targets, data_start, alignment), key=lambda p: (p.run.shard, p.run.offset))
    hashes = []
    with _Background(sink) as background:
        for shard, path in enumerate(paths):
            own = [piece for piece in pieces if piece.run.shard == shard]
            reader = _Reader(path, hashed, advance)
            try:
                for piece in own:
                    reader.skip_to(piece.run.offset)
                    for buffer, chunk, offset in _chunks(reader, piece, background):
                        if checked:
                            _check(chunk, piece.target)
                        data = _converted(chunk, piece, quantizer, importance)
                        background.put(buffer, piece.destination + offset, data, reader.hashing)
                hashes.append(reader.finish())
            finally:
                reader.close()
    return tuple(hashes) if hashed else ()


def _pieces(targets: Sequence[Target], data_start: int, alignment: int) -> Iterator[_Piece]:
    offsets = data_offsets([target.row for target in targets], alignment)
    for target, offset in zip(targets, offsets, strict=False):
        destination = data_start + offset
        if target.type_name == target.source_type:
            for run in target.runs:
                yield _Piece(run, destination, target, 0)
                destination += run.n_bytes
            continue
        n_matrix = max(len(target.matrices), 1)
        old_size, new_size = target.source_bytes // n_matrix, target.n_bytes // n_matrix
        matrices = [
            Run(run.shard, run.offset + start, old_size)
            for run in target.runs
            for start in range(0, run.n_bytes, old_size)
        ]
        for number, run in enumerate(matrices):
            yield _Piece(run, destination + number * new_size, target, number)


class _Reader:
    """One source file from front to back."""

    def __init__(self, path: Path, hashed: bool, advance: Callable[[int], None]) -> None:
        self._path, self._advance = path, advance
        self._fd = os.open(path, os.O_RDONLY)
        self._hash = hashlib.sha256() if hashed else None
        self._position = 0
        self._spare = bytearray(1 << 20)
        self._pool = ThreadPoolExecutor(1, "ggufmoe-hash")
        self.hashing: Future[None] | None = None  # of what was read last
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def skip_to(self, offset: int) -> None:
        while self._hash and self._position < offset:
            self.read(memoryview(self._spare)[: offset - self._position])
            self._wait()
        self._position = offset

    def read(self, into: memoryview) -> None:
        """Fill ``into`` from where the reader stands. Raises: FormatError if the file ends before."""
        start, view = self._position, into
        while view:
            try:
                done = os.preadv(self._fd, [view], self._position)
            except OSError as error:
                raise FormatError(
                    f"{self._path}: cannot be read at byte {self._position:,}: {error.strerror or error}",
                    hint="The disk may be failing.",
                ) from error
            if not done:
                raise FormatError(
                    f"{self._path}: the file is cut short: it ended at byte {self._position:,} while it was read",
                    hint="Something else is changing the file.",
                )
            self._position += done
            view = view[done:]
        if self._hash:
            self.hashing = self._pool.submit(self._hash.update, into)
        self._advance(self._position - start)

    def _wait(self) -> None:
        if self.hashing:
            self.hashing.result()

    def finish(self) -> str:
        """Read on to the end of the file. Returns: its hash."""
        if not self._hash:
            return ""
        self.skip_to(os.fstat(self._fd).st_size)
        self._wait()
        return self._hash.hexdigest()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._fd)


class _Background:
    """A thread that feeds a sink from a ring of buffers."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._free = deque(bytearray(CHUNK_BYTES) for _ in range(N_BUFFERS))
        self._busy: deque[tuple[Future[None], Future[None] | None, bytearray]] = deque()
        self._pool = ThreadPoolExecutor(1, "ggufmoe-write")

    def buffer(self) -> bytearray:
        if not self._free:
            self._collect()
        return self._free.popleft()

    def put(self, buffer: bytearray, offset: int, data: memoryview, other: Future[None] | None) -> None:
        """Send ``data``; ``buffer`` is used again when that and ``other`` are done."""
        self._busy.append((self._pool.submit(self._sink.put, offset, data), other, buffer))

    def _collect(self) -> None:
        done, other, buffer = self._busy.popleft()
        done.result()
        if other:
            other.result()
        self._free.append(buffer)

    def __enter__(self) -> _Background:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            while kind is None and self._busy:
                self._collect()
        finally:
            self._pool.shutdown(cancel_futures=True)


def _chunks(
    reader: _Reader, piece: _Piece, background: _Background
) -> Iterator[tuple[bytearray, memoryview, int]]:
    """Whole blocks or, to be quantised, whole rows of a piece, with their offsets in the result."""
    unit_in, unit_out = _units(piece.target)
    size = piece.run.n_bytes
    step = max(CHUNK_BYTES // unit_in, 1) * unit_in
    for start in range(0, size, step):
        n_bytes = min(step, size - start)
        buffer = background.buffer()
        if len(buffer) < n_bytes:  # a row longer than a chunk
            buffer = bytearray(n_bytes)
        chunk = memoryview(buffer)[:n_bytes]
        reader.read(chunk)
        yield buffer, chunk, start // unit_in * unit_out


def _units(target: Target) -> tuple[int, int]:
    """Bytes that must stay together in the source, and what they become."""
    if target.type_name == target.source_type:
        block = FORMATS.get(target.source_type)
        size = block.n_bytes if block else 1
        return size, size
    numbers = type_numbers()
    return (
        row_bytes(numbers[target.source_type], target.ne[0]),
        row_bytes(numbers[target.type_name], target.ne[0]),
    )


def _check(chunk: memoryview, target: Target) -> None:
    block = FORMATS.get(target.source_type)
    if block is None or not (EXPERT_NAME.fullmatch(target.name) or ROUTER_NAME.fullmatch(target.name)):
        return
    if len(chunk) % block.n_bytes == 0 and count_bad(np.frombuffer(chunk, np.uint8), block):
        raise BadBlocksFound(target.name)


def _converted(
    chunk: memoryview, piece: _Piece, quantizer: Quantizer | None, importance: Importance | None
) -> memoryview:
    target = piece.target
    if target.type_name == target.source_type:
        return chunk
    assert quantizer is not None
    block = FORMATS.get(target.source_type)
    if block and count_bad(np.frombuffer(chunk, np.uint8), block):  # of a NaN some quantisers make a number
        raise FormatError(
            f"{target.name}: it holds weights that are no numbers, which cannot be quantised",
            hint="Fetch the model from another source.",
        )
    numbers = type_numbers()
    columns = None
    values = (importance or {}).get(target.name)
    if values is not None:
        n_in = target.ne[0]
        matrix = target.matrices[piece.matrix]
        columns = np.ascontiguousarray(values[matrix * n_in : (matrix + 1) * n_in])
    try:
        return quantizer.rows(
            chunk, numbers[target.source_type], numbers[target.type_name], target.ne[0], columns
        )
    except FormatError as error:
        raise FormatError(f"{target.name}: {error}", hint="Fetch the model from another source.") from error


def source_bytes(paths: Sequence[Path], targets: Sequence[Target], hashed: bool) -> int:
    """How many bytes ``stream`` reads."""
    if hashed:
        return sum(path.stat().st_size for path in paths)
    return sum(target.source_bytes for target in targets)
