"""The headers of a converted file, and where its data goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from . import blocks as b
from .experts import EXPERT_NAME, BankKey
from .model import Model
from .targets import Target
from .writer import (
    ALIGNMENT_KEY,
    F32,
    STRING,
    U16,
    U32,
    U64,
    KeyRecord,
    data_offsets,
    header_data,
    key_record,
    with_key,
    without_keys,
)


@dataclass(frozen=True)
class Image:
    """A file to be written: its header (both tables of a block file), and its tensors behind it."""

    header: bytes
    targets: tuple[Target, ...]
    alignment: int

    @property
    def data_start(self) -> int:
        return len(self.header)

    @property
    def n_bytes(self) -> int:
        return self.data_start + data_offsets([target.row for target in self.targets], self.alignment)[-1]


@dataclass(frozen=True)
class BlockText:
    """What the keys of a block table say; the hashes are known last, and as long as ``HASH_PLACE`` before."""

    source_names: Sequence[str]
    source_hashes: Sequence[str]
    source_alignment: int | None
    order: str
    orders: Mapping[BankKey, Sequence[int]]
    heat: Mapping[BankKey, Sequence[float]]
    name: KeyRecord | None
    unknown: Sequence[KeyRecord] = ()


HASH_PLACE = "0" * 64


def stock_image(keys: Sequence[KeyRecord], targets: Sequence[Target], alignment: int) -> Image:
    header = header_data(keys, [target.row for target in targets], alignment)
    return Image(header, tuple(targets), alignment)


def block_image(
    keys: Sequence[KeyRecord], targets: Sequence[Target], alignment: int, text: BlockText
) -> Image:
    """A block file: the block table, and behind it the stock image, byte for byte."""
    stock = stock_image(keys, targets, alignment).header
    entries = [(target.row, target.name.encode(), (*target.ne, 1)[:3]) for target in targets]
    rows = b.block_rows(entries, text.orders, len(stock))
    sizes = [n_bytes for _, n_bytes in stack_slices(targets)]
    keys = _block_keys(text, alignment, n_block=_count_blocks(targets), block_bytes=max(sizes, default=0))
    return Image(header_data(keys, rows, alignment) + stock, tuple(targets), alignment)


def stack_slices(targets: Iterable[Target]) -> list[tuple[str, int]]:
    """Every stack of experts with the bytes of one expert in it."""
    return [(target.name, target.n_bytes // target.ne[2]) for target in targets if _is_stack(target)]


def _is_stack(target: Target) -> bool:
    match = EXPERT_NAME.fullmatch(target.name)
    return match is not None and match["part"] == "weight"


def _count_blocks(targets: Iterable[Target]) -> int:
    return sum(target.ne[2] for target in targets if _is_stack(target))


def _block_keys(text: BlockText, alignment: int, *, n_block: int, block_bytes: int) -> list[KeyRecord]:
    keys = [
        key_record("general.architecture", STRING, b.ARCHITECTURE),
        key_record("general.alignment", U32, alignment),
        *([text.name] if text.name else []),
        key_record(b.VERSION_KEY, U32, b.FORMAT_VERSION),
        key_record(b.SOURCE_NAME_KEY, STRING, text.source_names, array=True),
        key_record(b.SOURCE_HASH_KEY, STRING, text.source_hashes, array=True),
    ]
    if text.source_alignment is not None:
        keys.append(key_record(b.SOURCE_ALIGNMENT_KEY, U32, text.source_alignment))
    keys += [
        key_record(b.ORDER_KEY, STRING, text.order),
        key_record(b.BLOCK_COUNT_KEY, U64, n_block),
        key_record(b.BLOCK_BYTES_KEY, U64, block_bytes),
        *permutation_keys(text.orders),
    ]
    for (layer, bank), heat in sorted(text.heat.items()):
        keys.append(key_record(f"{b.HEAT_KEY}.{layer}.{bank}", F32, heat, array=True))
    return [*keys, *text.unknown]


def permutation_keys(orders: Mapping[BankKey, Sequence[int]]) -> list[KeyRecord]:
    return [
        key_record(f"{b.PERMUTATION_KEY}.{layer}.{bank}", U16, order, array=True)
        for (layer, bank), order in sorted(orders.items())
    ]


def stock_keys(
    keys: Sequence[KeyRecord], alignment: int | None, orders: Mapping[BankKey, Sequence[int]]
) -> list[KeyRecord]:
    """The keys of a stock table: those of the source, its alignment stated anew (None: not stated).

    A reordered file carries its permutation there too, so that it keeps it without the block table.
    """
    kept = [key for key in keys if not _is_ours(key)]
    if alignment is None:
        kept = without_keys(kept, ALIGNMENT_KEY)
    else:
        kept = with_key(kept, key_record("general.alignment", U32, alignment))
    if orders:
        kept += [key_record(b.VERSION_KEY, U32, b.FORMAT_VERSION), *permutation_keys(orders)]
    return kept


_KNOWN = frozenset(
    key.encode()
    for key in (
        "general.architecture",
        "general.alignment",
        "general.name",
        b.VERSION_KEY,
        b.SOURCE_NAME_KEY,
        b.SOURCE_HASH_KEY,
        b.SOURCE_ALIGNMENT_KEY,
        b.ORDER_KEY,
        b.BLOCK_COUNT_KEY,
        b.BLOCK_BYTES_KEY,
    )
)


def _is_ours(key: KeyRecord) -> bool:
    text = key.name.decode("utf-8", "replace")
    return text == b.VERSION_KEY or text.startswith((f"{b.PERMUTATION_KEY}.", f"{b.HEAT_KEY}."))


def unknown_keys(model: Model) -> list[KeyRecord]:
    """Keys of a block table that this version does not know: they are kept."""
    keys = model.blocks.keys if model.blocks else ()
    return [key for key in keys if key.name not in _KNOWN and not _is_ours(key)]


def stated_alignment(model: Model) -> int | None:
    """The alignment that the source states by a key, if it does."""
    if model.blocks:
        return model.blocks.source_alignment
    value = model.metadata.get("general.alignment")
    return value if isinstance(value, int) else None
