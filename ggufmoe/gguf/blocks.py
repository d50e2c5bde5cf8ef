"""Block files: a GGUF file with two tables of contents over the same bytes (docs/format.md).

The file's own header is the *block table*: every expert of every projection is a tensor of its own,
``blk.7.ffn_up_exps.12.weight``. Its first tensor, ``ggufmoe.stock_view``, holds a complete second header, the
*stock table*, which llama.cpp reads from that offset on, and whose data section begins right behind it.

What the block table must be follows from the stock table and the stored order of the experts. So it is not
believed but made again and compared.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import FormatError
from ..native.metadata import FIRST_READ, MAX_HEADER_BYTES, Header, Value, read_header, read_start
from .experts import EXPERT_NAME, BankKey, ExpertBank, TensorInfo
from .scanner import Scan, scan_header, scan_keys
from .writer import STRING, KeyRecord, TableRow, key_record, padded, shape_data, table_data

ARCHITECTURE = "ggufmoe"
FORMAT_VERSION = 1
STOCK_VIEW = "ggufmoe.stock_view"
PREFIX = b"ggufmoe."
I8 = 24  # GGML_TYPE_I8

VERSION_KEY = "ggufmoe.version"
SOURCE_NAME_KEY, SOURCE_HASH_KEY = "ggufmoe.source.name", "ggufmoe.source.sha256"
SOURCE_ALIGNMENT_KEY = "ggufmoe.source.alignment"
ORDER_KEY = "ggufmoe.order"
BLOCK_COUNT_KEY, BLOCK_BYTES_KEY = "ggufmoe.block.count", "ggufmoe.block.bytes"
PERMUTATION_KEY, HEAT_KEY = "ggufmoe.permutation", "ggufmoe.heat"

# A page: blocks can then be read past the page cache, and given back one by one
LARGEST_ALIGNMENT, SMALLEST_ALIGNMENT = 4096, 32

DAMAGED_HINT = "Convert the source again; nothing but `ggufmoe convert` may rewrite such a file."
_BANK_KEY = re.compile(r"ggufmoe\.(?P<what>permutation|heat)\.(?P<layer>\d{1,4})\.(?P<bank>exps|chexps)")


@dataclass(frozen=True)
class BlockFacts:
    """What only a block table says. ``source_alignment`` is None where the source states none."""

    version: int
    alignment: int
    source_names: tuple[str, ...]
    source_hashes: tuple[str, ...]
    source_alignment: int | None
    order: str
    keys: tuple[KeyRecord, ...] = field(repr=False)


@dataclass(frozen=True)
class BlockFile:
    """The stock table of a block file, with offsets from the start of the file, and what the block table adds."""

    stock: Header
    stock_offset: int
    facts: BlockFacts
    metadata: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Block:
    """One projection of one expert, by its original number. ``offset`` is from the start of its file."""

    name: str
    layer: int
    bank: str
    expert: int
    projection: str
    type_name: str
    offset: int
    n_bytes: int
    shard: int
    heat: float | None


def block_name(stack: str, expert: int) -> str:
    """``blk.3.ffn_up_exps.weight``, 12 -> ``blk.3.ffn_up_exps.12.weight``"""
    return f"{stack.removesuffix('.weight')}.{expert}.weight"


def list_blocks(banks: Iterable[ExpertBank], heat: Mapping[BankKey, Sequence[float]]) -> Iterator[Block]:
    """Every block of a model, converted or not, in the order of the file."""
    found = []
    for bank in banks:
        temperatures = heat.get((bank.layer, bank.name), ())
        known = len(temperatures) == bank.n_expert
        for projection, tensor in bank.weights.items():
            size = tensor.n_bytes // bank.n_expert
            found += [
                Block(
                    block_name(tensor.name, expert),
                    bank.layer,
                    bank.name,
                    expert,
                    projection,
                    tensor.type_name,
                    tensor.offset + position * size,
                    size,
                    tensor.shard,
                    temperatures[expert] if known else None,
                )
                for position, expert in enumerate(bank.experts)
            ]
    return iter(sorted(found, key=lambda block: (block.shard, block.offset)))


def block_alignment(slices: Iterable[tuple[str, int]]) -> int:
    """The largest power of two up to a page that divides the size of every block.

    ``slices`` are (tensor, bytes of one expert in it).
    Raises: FormatError that names the tensor for which there is none.
    """
    alignment = LARGEST_ALIGNMENT
    for name, n_bytes in slices:
        while n_bytes % alignment:
            alignment //= 2
        if alignment < SMALLEST_ALIGNMENT:
            raise FormatError(
                f"one expert of {name} has {n_bytes:,} bytes, which is no multiple of {SMALLEST_ALIGNMENT}, so "
                "experts cannot be tensors of their own",
                hint="Use --layout stock, or run the model as it is.",
            )
    return alignment


def block_rows(
    stock: Sequence[tuple[TableRow, bytes, tuple[int, ...]]],
    orders: Mapping[BankKey, Sequence[int]],
    stock_bytes: int,
) -> list[TableRow]:
    """The block table over a stock table; ``stock`` has (row, name, ne) of each of its tensors.

    ``ne`` of a stack has its third dimension even if that is 1.
    """
    rows = [TableRow(shape_data(STOCK_VIEW.encode(), (stock_bytes,)), I8, stock_bytes)]
    for row, name, ne in stock:
        match = EXPERT_NAME.fullmatch(name.decode("utf-8", "replace"))
        if match is None or match["part"] != "weight":
            rows.append(row)
            continue
        n_expert = ne[2]
        order = orders.get((int(match["layer"]), match["bank"])) or range(n_expert)
        dims = struct.pack("<I2Q", 2, *ne[:2])
        stem = name.removesuffix(b".weight")
        for expert in order:
            block = stem + b".%d.weight" % expert
            rows.append(
                TableRow(
                    struct.pack("<Q", len(block)) + block + dims, row.type_number, row.n_bytes // n_expert
                )
            )
    return rows


def starts_as_block_file(start: bytes) -> bool:
    """Whether a header that begins with ``start`` (100 bytes are enough) is that of a block file."""
    return start[24:].startswith(key_record("general.architecture", STRING, ARCHITECTURE).data)


def bank_values(metadata: Mapping[str, Value], what: str) -> dict[BankKey, tuple[float, ...]]:
    """The arrays ``ggufmoe.<what>.<layer>.<bank>`` of numbers."""
    found = {}
    for key, value in metadata.items():
        match = _BANK_KEY.fullmatch(key)
        if match and match["what"] == what and isinstance(value, tuple):
            numbers = tuple(v for v in value if isinstance(v, (int, float)))
            if len(numbers) == len(value):
                found[int(match["layer"]), match["bank"]] = numbers
    return found


def bank_orders(metadata: Mapping[str, Value]) -> dict[BankKey, tuple[int, ...]]:
    """The stored orders: at each position the original number of the expert."""
    return {
        bank: tuple(int(v) for v in order) for bank, order in bank_values(metadata, "permutation").items()
    }


# Reading -----------------------------------------------------------------------------------------------


def read_block_file(path: Path, n_bytes: int) -> BlockFile:
    """Read both tables of a block file and check that they describe the same bytes.

    Raises: FormatError that names the fault, without the path in front.
    """
    data = read_start(path, FIRST_READ)
    if len(data) == FIRST_READ:
        data = read_start(path, MAX_HEADER_BYTES)
    scan = scan_header(data, end_of_data="the file ends" if len(data) == n_bytes else "64 MiB end")
    facts, metadata = _facts(data, scan)
    start = padded(scan.end, facts.alignment)
    size = _stock_size(data, scan)
    if start + size > n_bytes:
        raise FormatError(f"the file is cut short: it ends inside {STOCK_VIEW}", hint=DAMAGED_HINT)
    stock_data = _read(path, start, size)
    stock = read_header(stock_data)
    if stock.data_offset != size or stock.alignment != facts.alignment:
        raise FormatError(f"{STOCK_VIEW} is not the header of what follows it", hint=DAMAGED_HINT)
    _check_blocks(data, scan, stock, stock_data, bank_orders(metadata), facts.alignment)
    absolute = Header(
        stock.version, stock.alignment, start + stock.data_offset, stock.metadata, stock.tensors
    )
    return BlockFile(absolute, start, facts, metadata)


def _read(path: Path, start: int, n_bytes: int) -> bytes:
    if n_bytes > MAX_HEADER_BYTES:
        raise FormatError(f"{STOCK_VIEW} claims {n_bytes:,} bytes, more than any header has")
    with path.open("rb") as file:
        file.seek(start)
        return file.read(n_bytes)


def _facts(data: bytes, scan: Scan) -> tuple[BlockFacts, Mapping[str, Value]]:
    end = scan_keys(data).end
    # ggml reads the keys, by themselves: of a table with 100,000 entries it would make 100,000 tensors
    keys_only = data[:8] + struct.pack("<QQ", 0, len(scan.keys)) + data[24:end]
    metadata = read_header(keys_only + bytes(LARGEST_ALIGNMENT)).metadata
    version = metadata.get(VERSION_KEY)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"a block file without a version ({VERSION_KEY})", hint=DAMAGED_HINT)
    if version > FORMAT_VERSION:
        raise FormatError(
            f"a block file of version {version}, newer than this ggufmoe knows (up to {FORMAT_VERSION})",
            hint="Install a newer ggufmoe, or convert the source again.",
        )
    alignment = metadata.get("general.alignment")
    power_of_two = isinstance(alignment, int) and alignment > 0 and not alignment & (alignment - 1)
    if not isinstance(alignment, int) or not power_of_two or alignment > LARGEST_ALIGNMENT:
        raise FormatError(f"a block file whose general.alignment is {alignment!r}", hint=DAMAGED_HINT)
    stated = metadata.get(SOURCE_ALIGNMENT_KEY)
    order = metadata.get(ORDER_KEY)
    keys = tuple(KeyRecord(key.name, data[key.start : key.end]) for key in scan.keys)
    facts = BlockFacts(
        version,
        alignment,
        _texts(metadata.get(SOURCE_NAME_KEY)),
        _texts(metadata.get(SOURCE_HASH_KEY)),
        stated if isinstance(stated, int) else None,
        order if isinstance(order, str) else "file",
        keys,
    )
    return facts, metadata


def _texts(value: Value | None) -> tuple[str, ...]:
    return tuple(str(text) for text in value) if isinstance(value, tuple) else ()


def _stock_size(data: bytes, scan: Scan) -> int:
    """The bytes of the stock table, from the first entry of the block table."""
    if not scan.tensors or scan.tensors[0].name != STOCK_VIEW:
        raise FormatError(f"a block file that does not begin with {STOCK_VIEW}", hint=DAMAGED_HINT)
    first = scan.tensors[0]
    dims = data[first.start + 8 + len(STOCK_VIEW) : first.type_position]
    if len(dims) != 12 or first.type_number != I8:
        raise FormatError(f"{STOCK_VIEW} is not a row of bytes", hint=DAMAGED_HINT)
    return int(struct.unpack_from("<Q", dims, 4)[0])


def _check_blocks(
    data: bytes,
    scan: Scan,
    stock: Header,
    stock_data: bytes,
    orders: Mapping[BankKey, tuple[int, ...]],
    alignment: int,
) -> None:
    entries = scan_header(stock_data).tensors
    tensors = []
    for entry, raw in zip(entries, stock.tensors, strict=True):
        shape = stock_data[entry.start : entry.type_position]
        name = shape[8 : 8 + struct.unpack_from("<Q", shape)[0]]
        ne = raw.ne if len(raw.ne) > 2 else (*raw.ne, 1, 1)[:3]
        match = EXPERT_NAME.fullmatch(raw.name)
        order = orders.get((int(match["layer"]), match["bank"])) if match else None
        if order and match and match["part"] == "weight" and sorted(order) != list(range(ne[2])):
            raise FormatError(
                f"the stored order of the experts of {raw.name} is no permutation of them", hint=DAMAGED_HINT
            )
        tensors.append((TableRow(shape, raw.type_number, raw.n_bytes), name, ne))
    if _count_rows(tensors) != len(scan.tensors):  # before a claim of 2^40 experts becomes a list
        raise FormatError(
            f"its block table has {len(scan.tensors):,} entries, by {STOCK_VIEW} it must have "
            f"{_count_rows(tensors):,}",
            hint=DAMAGED_HINT,
        )
    rows = block_rows(tensors, orders, len(stock_data))
    expected = table_data(rows, alignment)
    begin = scan.tensors[0].start
    if expected == data[begin : scan.end]:
        return
    wrong = next(
        number
        for number, entry in enumerate(scan.tensors, 1)
        if data[entry.start : (end := entry.type_position + 12)]
        != expected[entry.start - begin : end - begin]
    )
    raise FormatError(
        f"its block table does not describe the same bytes as {STOCK_VIEW} (entry {wrong:,} of "
        f"{len(scan.tensors):,})",
        hint=DAMAGED_HINT,
    )


def _count_rows(stock: Sequence[tuple[TableRow, bytes, tuple[int, ...]]]) -> int:
    matches = ((EXPERT_NAME.fullmatch(name.decode("utf-8", "replace")), ne) for _, name, ne in stock)
    return 1 + sum(ne[2] if match and match["part"] == "weight" else 1 for match, ne in matches)


def tensor_slices(tensors: Iterable[TensorInfo]) -> Iterator[tuple[str, int]]:
    """Expert matrices with the bytes of one expert in each."""
    for tensor in tensors:
        match = EXPERT_NAME.fullmatch(tensor.name)
        if match and match["part"] == "weight":
            yield tensor.name, tensor.n_bytes // tensor.ne[2]
