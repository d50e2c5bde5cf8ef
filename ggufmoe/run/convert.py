"""One model file from another: split into blocks, reordered, quantised, or put back as it was.

Everything that can be refused is refused before a byte is written. The new file grows under a temporary name
beside the place it is meant for, and gets its name when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ..errors import FormatError, GgufMoeError, UsageError
from ..gguf.badblocks import find_bad_blocks
from ..gguf.blocks import block_alignment
from ..gguf.checks import check_runnable
from ..gguf.experts import BankKey
from ..gguf.image import (
    HASH_PLACE,
    BlockText,
    Image,
    block_image,
    stack_slices,
    stated_alignment,
    stock_image,
    stock_keys,
    unknown_keys,
)
from ..gguf.model import Model, open_model, without_extra_tensors
from ..gguf.order import Profile, bank_heat, check_profile, hot_orders
from ..gguf.rewriter import BadBlocksFound, FileComparer, FileWriter, Sink, source_bytes, stream
from ..gguf.targets import Target, find_targets, merge_old_layout, read_source
from ..gguf.writer import DEFAULT_ALIGNMENT, KeyRecord, padded
from ..native.quantize import Quantizer
from .quantize import Quantization, Quantized, quantized

LAYOUTS = ("blocks", "stock")
ORDERS = ("auto", "file", "heat")
OnProgress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all


@dataclass(frozen=True)
class ConvertOptions:
    """What to make of a model. ``order`` ``auto`` is by heat where a profile is given or stored in the file."""

    layout: str = "blocks"
    order: str = "auto"
    profile: Profile | None = None
    quantization: Quantization = field(default_factory=Quantization)
    force: bool = False
    verify: bool = False
    allow_bad_blocks: bool = False
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. ``n_left_out`` are tensors of a vision or audio part in a file of Ollama's.

    ``matches_source`` says, for an export that was verified, whether the file has the source's hash.
    """

    path: Path
    n_bytes: int
    n_block: int
    block_alignment: int
    order: str
    types: tuple[str, ...]
    source_hashes: tuple[str, ...]
    n_left_out: int = 0
    matches_source: bool | None = None


@dataclass(frozen=True)
class _Job:
    """All that is decided before a byte is written."""

    model: Model
    targets: tuple[Target, ...]
    quantized: Quantized | None
    image: Callable[[Sequence[str]], Image]  # of the hashes of the source files
    hashed: bool


def convert(
    source: str | Path,
    out: Path,
    options: ConvertOptions | None = None,
    on_progress: OnProgress = lambda _phase, _done, _total: None,
) -> Converted:
    """Write the model at ``source`` to ``out``.

    Raises: FormatError for a model that cannot be converted; UsageError for what cannot be asked, or an
    ``out`` that exists; GgufMoeError if it cannot be written. Nothing is left behind then.
    """
    options = options or ConvertOptions()
    whole = open_model(source)
    _check_destination(whole, out, options.force)
    model = without_extra_tensors(whole)
    tables = read_source(model)
    targets: tuple[Target, ...] | None = None
    if model.has_old_expert_layout:
        model, targets = merge_old_layout(tables)
    check_runnable(model)
    _check_sizes(whole)
    orders, heat, by_heat = _orders(model, options)
    if targets is None:
        targets = find_targets(tables, orders)
    elif by_heat:
        raise UsageError(
            f"{source}: experts in the layout of before April 2024 cannot be reordered as they are merged.",
            hint="Convert the file with --order file first, and the result with --order heat.",
        )
    keys: tuple[KeyRecord, ...] = tables.keys
    result = None
    if options.quantization:
        with _reported(out):
            result = quantized(keys, targets, options.quantization, _temporary(out))
        keys, targets = result.keys, result.targets
    changed = {key: order for key, order in orders.items() if list(order) != sorted(order)}
    job = _job(model, keys, targets, changed, heat, by_heat, result, options)
    hashes, image = _write(job, out, options, on_progress)
    return Converted(
        out,
        image.n_bytes,
        sum(target.ne[2] for target in targets if target.name in dict(stack_slices(targets))),
        image.alignment,
        "heat" if by_heat else "file",
        tuple(sorted({target.type_name for target in targets})),
        hashes,
        len(whole.tensors) - len(without_extra_tensors(whole).tensors),
    )


def export(
    source: str | Path,
    out: Path,
    *,
    force: bool = False,
    verify: bool = False,
    on_progress: OnProgress = lambda _phase, _done, _total: None,
) -> Converted:
    """Write the stock GGUF file that a block file was made from: same keys, same tensors, original order.

    Raises: as ``convert``; UsageError if ``source`` is no block file.
    """
    model = open_model(source)
    if model.blocks is None:
        raise UsageError(
            f"{source}: not a block file, so there is nothing to export.",
            hint="`ggufmoe convert` makes block files; this file runs in llama.cpp as it is.",
        )
    _check_destination(model, out, force)
    tables = read_source(model)
    originals = {(bank.layer, bank.name): range(bank.n_expert) for bank in model.banks}
    targets = find_targets(tables, originals)
    alignment = model.blocks.source_alignment
    image = stock_image(stock_keys(tables.keys, alignment, {}), targets, alignment or DEFAULT_ALIGNMENT)
    options = ConvertOptions(layout="stock", force=force, verify=verify, allow_bad_blocks=True)
    _write(_Job(model, targets, None, lambda _hashes: image, False), out, options, on_progress)
    matches = None
    if verify and len(model.blocks.source_hashes) == 1:
        matches = _hash(out) == model.blocks.source_hashes[0]
    types = tuple(sorted({target.type_name for target in targets}))
    return Converted(
        out, image.n_bytes, 0, image.alignment, "file", types, model.blocks.source_hashes, 0, matches
    )


# Deciding ---------------------------------------------------------------------------------------------------


def _orders(
    model: Model, options: ConvertOptions
) -> tuple[dict[BankKey, tuple[int, ...]], Mapping[BankKey, Sequence[float]], bool]:
    """The order of every bank, the heat to store, and whether the heat decided the order."""
    heat: Mapping[BankKey, Sequence[float]] = model.heat
    if options.profile is not None:
        check_profile(model, options.profile)
        heat = bank_heat(model, options.profile)
    if options.order == "heat" and not heat:
        raise UsageError(
            "There is no routing profile to order the experts by.", hint="Give one with --profile FILE."
        )
    by_heat = options.order != "file" and bool(heat)
    orders = {(bank.layer, bank.name): tuple(bank.experts) for bank in model.banks}
    if by_heat:
        try:
            orders.update(hot_orders(model, heat))
        except FormatError:
            if options.order == "heat":
                raise
            by_heat = False
    return orders, heat, by_heat


def _job(
    model: Model,
    keys: Sequence[KeyRecord],
    targets: tuple[Target, ...],
    orders: Mapping[BankKey, Sequence[int]],
    heat: Mapping[BankKey, Sequence[float]],
    by_heat: bool,
    result: Quantized | None,
    options: ConvertOptions,
) -> _Job:
    try:
        alignment = block_alignment(stack_slices(targets))
    except FormatError as error:
        if options.layout == "blocks":
            raise FormatError(f"{model.paths[0]}: {error}", hint=error.hint) from error
        alignment = stated_alignment(model) or DEFAULT_ALIGNMENT
    stock = stock_keys(keys, alignment, orders)
    if options.layout == "stock":
        image = stock_image(stock, targets, alignment)
        return _Job(model, targets, result, lambda _hashes: image, False)
    kept = model.blocks if result is None else None  # still the same weights: their source stays the source
    text = BlockText(
        source_names=kept.source_names if kept else [_text(path.name) for path in model.paths],
        source_hashes=kept.source_hashes if kept else [HASH_PLACE] * len(model.paths),
        source_alignment=stated_alignment(model),
        order="heat" if by_heat or orders else "file",
        orders=orders,
        heat=heat,
        name=next((key for key in stock if key.name == b"general.name"), None),
        unknown=unknown_keys(model),
    )

    def image_of(hashes: Sequence[str]) -> Image:
        done = replace(text, source_hashes=hashes) if hashes else text
        return block_image(stock, targets, alignment, done)

    return _Job(model, targets, result, image_of, kept is None)


def _text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")


def _check_sizes(model: Model) -> None:
    """Refuse a file with more behind its tensors than padding: it is not what its header says."""
    for shard, path in enumerate(model.paths):
        ends = [tensor.offset + tensor.n_bytes for tensor in model.tensors if tensor.shard == shard]
        value = model.metadata.get("general.alignment")
        largest = max(value if isinstance(value, int) else 0, DEFAULT_ALIGNMENT)
        size = path.stat().st_size
        if ends and size > padded(max(ends), largest):
            raise FormatError(
                f"{path}: the file is too long: it has {size:,} bytes, its tensors end at {max(ends):,}",
                hint="The download may hold another file behind the model; fetch it again.",
            )


def _check_destination(model: Model, out: Path, force: bool) -> None:
    if out.is_dir():
        raise UsageError(f"{out}: a folder, not a file to write.", hint="Give the name of a file with -o.")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: its folder does not exist.", hint="Create it, or choose another place.")
    if out.exists():
        if any(out.samefile(path) for path in model.paths):
            raise UsageError(f"{out}: that is the model itself.", hint="Give another name with -o.")
        if not force:
            raise UsageError(f"{out}: exists already.", hint="Give another name, or --force to replace it.")


# Writing ----------------------------------------------------------------------------------------------------


def _write(
    job: _Job, out: Path, options: ConvertOptions, on_progress: OnProgress
) -> tuple[tuple[str, ...], Image]:
    image = job.image(())
    free = shutil.disk_usage(out.parent).free
    if image.n_bytes > free:
        raise GgufMoeError(
            f"{out}: needs {image.n_bytes:,} bytes, {free:,} are free there ({image.n_bytes - free:,} too few).",
            hint="Free some space, or choose another disk with -o.",
        )
    try:
        with _reported(out), _growing(out) as (temporary, fd):
            os.truncate(fd, image.n_bytes)
            hashes = _stream(job, image, FileWriter(fd), "Converting", options, on_progress)
            image = job.image(hashes)
            FileWriter(fd).put(0, memoryview(image.header))
            if options.verify:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what the disk holds, not the memory
                check = FileComparer(fd, out)
                check.put(0, memoryview(image.header))
                _stream(replace(job, hashed=False), image, check, "Verifying", options, on_progress)
            temporary.replace(out)
    except BadBlocksFound as found:
        raise _bad_blocks_error(job.model, str(found)) from found
    return hashes, image


def _stream(
    job: _Job, image: Image, sink: Sink, phase: str, options: ConvertOptions, on_progress: OnProgress
) -> tuple[str, ...]:
    total = source_bytes(job.model.paths, job.targets, job.hashed)
    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        on_progress(phase, done, total)

    n_threads = options.threads or psutil.cpu_count(logical=False) or 1
    quantizer = Quantizer(n_threads) if job.quantized else None
    return stream(
        job.model.paths,
        job.targets,
        sink,
        data_start=image.data_start,
        alignment=image.alignment,
        hashed=job.hashed,
        checked=not options.allow_bad_blocks,
        quantizer=quantizer,
        importance=job.quantized.importance if job.quantized else None,
        advance=advance,
    )


@contextmanager
def _reported(out: Path) -> Iterator[None]:
    """An error of the file system inside the block is one of writing ``out``; reading has its own."""
    try:
        yield
    except OSError as error:
        raise GgufMoeError(
            f"{out}: cannot be written: {error.strerror or error}", hint="Choose another place with -o."
        ) from error


def _temporary(out: Path) -> Path:
    """A name beside ``out`` that fits every file system, whatever the length of ``out``'s own."""
    return out.with_name(f".ggufmoe-{os.getpid()}-{secrets.token_hex(4)}.part")


@contextmanager
def _growing(out: Path) -> Iterator[tuple[Path, int]]:
    """A new file that is removed unless the block renames it."""
    temporary = _temporary(out)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield temporary, fd
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def _bad_blocks_error(model: Model, tensor: str) -> FormatError:
    found = find_bad_blocks(model) if not model.has_old_expert_layout else []
    hint = "Fetch the model from another source, or use --allow-bad-blocks to convert it all the same."
    if not found:
        return FormatError(f"{model.paths[0]}: {tensor} holds weights that are no numbers", hint=hint)
    first = found[0]
    expert = "" if first.expert is None else f", expert {first.expert}"
    more = f" (and in {len(found) - 1} more places)" if len(found) > 1 else ""
    return FormatError(
        f"{model.paths[0]}: weights that are no numbers: layer {first.layer}, {first.projection}{expert}: "
        f"{first.n_bad_blocks} bad blocks{more}",
        hint=f"{hint} `ggufmoe inspect --check` lists all of them.",
    )


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
