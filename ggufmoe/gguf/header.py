"""Open one file: is it GGUF, is it one that we know, does it hold what its header claims?

Every refusal is one FormatError that names the file first and then the fault.
"""

from __future__ import annotations

import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from ..errors import FormatError
from ..native.metadata import MAX_HEADER_BYTES, Header, read_header, read_start
from .blocks import ARCHITECTURE, BlockFile, read_block_file, starts_as_block_file
from .ollama_dialect import with_llama_cpp_types
from .scanner import scan_header

OLDEST_VERSION, NEWEST_VERSION = 2, 3
# Far above any model (1,024 experts in 100 layers, each a tensor of its own, make 300,000), and small enough
# that a table of this length takes neither gigabytes nor minutes.
MAX_TENSORS, MAX_KEYS = 1 << 20, 1 << 16
MAX_ALIGNMENT = 1 << 20

DAMAGED_HINT = "The file is damaged or incomplete; compare its size with the source."
START_BYTES = 24  # magic, version, number of tensors, number of keys

# What people have in hand when they think that they have a model, by how it begins
NOT_GGUF = {
    b"vers": (
        "a Git LFS pointer, not the model itself",
        "Fetch the file with 'git lfs pull', or by its link.",
    ),
    b"<!DO": ("a web page, not a model", "The download failed; fetch the file by its direct link."),
    b"<htm": ("a web page, not a model", "The download failed; fetch the file by its direct link."),
    b"PK\x03\x04": ("a zip archive or a PyTorch file, not a GGUF file", "Fetch the GGUF file of this model."),
    b"lmgg": ("a GGML file of before GGUF: too old", "Fetch the GGUF file of this model."),
    b"fmgg": ("a GGML file of before GGUF: too old", "Fetch the GGUF file of this model."),
    b"tjgg": ("a GGML file of before GGUF: too old", "Fetch the GGUF file of this model."),
}

# Where ggml says too little: it ran out of bytes and does not name the key, or met what Ollama writes
UNCLEAR = re.compile(r"failed to read|string length|of type 4 \(")


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of one file. ``renumbered`` are the tensors whose type was written in Ollama's numbering.

    Of a block file, ``header`` is the stock table in it, as llama.cpp reads it.
    """

    header: Header
    renumbered: tuple[str, ...] = ()
    blocks: BlockFile | None = None


def open_header(path: Path) -> FileHeader:
    """Read and check the header of one file; of the rest, only the size is looked at.

    Raises: FormatError that names ``path`` and the fault: no GGUF file, another version or byte order,
    damaged, cut short.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever, a device has no end
            raise FormatError(f"{path}: not a file", hint="Give the path of a GGUF file.")
        start = read_start(path, 2 * START_BYTES + 64)
        _check_start(path, start)
        if starts_as_block_file(start):
            result = _read_blocks(path, status.st_size)
        else:
            result = _read(path, status.st_size)
            if result.header.metadata.get("general.architecture") == ARCHITECTURE:
                result = _read_blocks(path, status.st_size)
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened: {error.strerror or error}") from error
    _check_claims(path, result.header, status.st_size)
    return result


def _read(path: Path, n_bytes: int) -> FileHeader:
    try:
        return FileHeader(read_header(path))
    except FormatError as refusal:
        reason = str(refusal)
        if UNCLEAR.search(reason):
            data = read_start(path)
            try:
                scan = scan_header(data, end_of_data=_end(data, n_bytes))
                patched, renumbered = with_llama_cpp_types(data, scan)
                if renumbered:
                    return FileHeader(read_header(patched), renumbered)
            except FormatError as finding:
                reason = str(finding)
        if "beginning of data section" in reason:
            reason = "the file ends before its tensor data begins, or general.alignment is wrong"
        # on one line: names in it come from the file and may hold anything
        reason = " ".join(reason.split())
        raise FormatError(f"{path}: not a GGUF file we can trust: {reason}", hint=DAMAGED_HINT) from refusal


def _read_blocks(path: Path, n_bytes: int) -> FileHeader:
    try:
        found = read_block_file(path, n_bytes)
    except FormatError as refusal:
        reason = " ".join(str(refusal).split())
        hint = refusal.hint or DAMAGED_HINT
        raise FormatError(f"{path}: not a block file we can trust: {reason}", hint=hint) from refusal
    return FileHeader(found.stock, (), found)


def _end(data: bytes, n_bytes: int) -> str:
    return "the file ends" if len(data) == n_bytes else f"the first {MAX_HEADER_BYTES >> 20} MiB end"


def _check_start(path: Path, start: bytes) -> None:
    if start[:4] != b"GGUF":
        what, hint = NOT_GGUF.get(
            start[:4], ("not a GGUF file", "ggufmoe reads GGUF models, as llama.cpp does.")
        )
        raise FormatError(f"{path}: {what}", hint=hint)
    if len(start) < START_BYTES:
        raise FormatError(f"{path}: too short to be a GGUF file: {len(start)} bytes", hint=DAMAGED_HINT)
    version, n_tensors, n_keys = struct.unpack_from("<IQQ", start, 4)
    if version and version & 0xFFFF == 0:
        raise FormatError(
            f"{path}: made for a machine of another byte order (big-endian)",
            hint="Fetch the little-endian file of this model.",
        )
    if version < OLDEST_VERSION:
        raise FormatError(
            f"{path}: GGUF version {version} is too old", hint="Fetch a newer file of the model."
        )
    if version > NEWEST_VERSION:
        raise FormatError(
            f"{path}: GGUF version {version} is newer than we know (up to {NEWEST_VERSION})",
            hint="A newer ggufmoe may read it.",
        )
    for count, limit, what in ((n_tensors, MAX_TENSORS, "tensors"), (n_keys, MAX_KEYS, "keys")):
        if count > limit:
            raise FormatError(
                f"{path}: not a GGUF file we can trust: it claims {count:,} {what}, more than any model has "
                f"(limit {limit:,})",
                hint=DAMAGED_HINT,
            )


def _check_claims(path: Path, header: Header, n_bytes: int) -> None:
    """What ggml believes: an alignment of any power of two, and data that it does not look at."""
    if header.alignment > MAX_ALIGNMENT:
        raise FormatError(
            f"{path}: general.alignment is {header.alignment:,} bytes, more than any model uses "
            f"(limit {MAX_ALIGNMENT:,})",
            hint=DAMAGED_HINT,
        )
    names = {tensor.name for tensor in header.tensors}
    if len(names) != len(header.tensors):  # they differ behind a NUL, or in bytes that are no text
        raise FormatError(f"{path}: two tensors have the same name", hint=DAMAGED_HINT)
    if header.tensors:
        last = header.tensors[-1]  # ggml accepts a table only if each tensor begins where the one before ends
        end = header.data_offset + last.offset + last.n_bytes
        if n_bytes < end:
            raise FormatError(
                f"{path}: the file is cut short: it has {n_bytes:,} bytes, but its tensors need {end:,}",
                hint="The download may be incomplete; compare its size with the source.",
            )
