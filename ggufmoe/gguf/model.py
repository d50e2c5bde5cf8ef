"""Open a model: one GGUF file, any shard of a split one, a folder that holds one, or the bundled ``demo``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ..errors import FormatError
from ..native.metadata import Value
from .blocks import FORMAT_VERSION, VERSION_KEY, BlockFacts, bank_orders, bank_values
from .experts import (
    OLD_EXPERT_NAME,
    BankKey,
    ExpertBank,
    TensorInfo,
    find_banks,
    is_expert_tensor,
    stacked_ne,
)
from .ollama_dialect import is_extra_tensor, ollama_differences
from .shards import existing_file, open_shards

T = TypeVar("T", int, float, bool, str)

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS, src/llama-hparams.h


@dataclass(frozen=True)
class Model:
    """A model's tables, without its weights.

    ``paths`` are its shards in order, under the names they were given by. ``metadata`` is that of the first
    shard; vocabulary arrays are not read (see ``ArrayInfo``). ``ollama_differences`` is empty, or says why
    llama.cpp cannot run this file of Ollama's own engine; ``renumbered`` are the tensors in Ollama's own form
    of MXFP4.

    Of a block file, all this is what llama.cpp finds in its stock table, which begins at ``stock_offset``, and
    ``blocks`` is what else there is. ``orders`` has the original number of the expert at each position, for
    the banks that were reordered, and ``heat`` how often each expert was chosen, by original number.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    ollama_differences: tuple[str, ...] = ()
    renumbered: tuple[str, ...] = ()
    stock_offset: int = 0
    blocks: BlockFacts | None = None
    orders: Mapping[BankKey, tuple[int, ...]] = field(default_factory=dict)
    heat: Mapping[BankKey, tuple[float, ...]] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def name(self) -> str:
        value = self.metadata.get("general.name")
        return value if isinstance(value, str) and value else self.paths[0].stem

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def banks(self) -> tuple[ExpertBank, ...]:
        try:
            return find_banks(self.tensors, self.orders)
        except FormatError as error:
            raise FormatError(
                f"{self.paths[0]}: {error}", hint="The file is damaged, or made wrongly; fetch it again."
            ) from error

    @cached_property
    def dense_tensors(self) -> tuple[TensorInfo, ...]:
        """All that every token needs: embeddings, attention, routers, norms, shared experts, output."""
        return tuple(tensor for tensor in self.tensors if not is_expert_tensor(tensor.name))

    @property
    def has_old_expert_layout(self) -> bool:
        return any(OLD_EXPERT_NAME.fullmatch(tensor.name) for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    def get(self, key: str, default: T) -> T:
        """A scalar of the architecture's own keys: ``get("expert_count", 0)`` reads ``llama4.expert_count``.

        A value of another type than ``default`` is not trusted: the default stands.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(default, float) and isinstance(value, int):
            value = float(value)
        return value if type(value) is type(default) else default

    def per_layer(self, key: str, default: int) -> tuple[int, ...]:
        """A value that GGUF stores once or once per layer, for each layer (``MAX_LAYERS`` at most)."""
        n_layer = max(0, min(self.get("block_count", 0), MAX_LAYERS))
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            numbers = [int(v) if isinstance(v, int) else default for v in value[:n_layer]]
            return tuple(numbers + [default] * (n_layer - len(numbers)))
        return (int(value) if isinstance(value, int) else default,) * n_layer


def open_model(path: str | Path) -> Model:
    """Read the tables of the model at ``path``; no weight is touched.

    Raises: UsageError if there is no such model; FormatError if a file of it cannot be trusted: damaged, cut
    short, of another byte order or version, or one of several shards that do not belong together.
    """
    files = open_shards(existing_file(Path(path)))
    tensors = tuple(
        TensorInfo(
            raw.name,
            raw.type_name,
            stacked_ne(raw.name, raw.ne),
            raw.n_bytes,
            shard,
            file.header.data_offset + raw.offset,
        )
        for shard, (_, file) in enumerate(files)
        for raw in file.header.tensors
    )
    first = files[0][1]
    metadata = first.header.metadata
    renumbered = tuple(name for _, file in files for name in file.renumbered)
    differences = ollama_differences(metadata, [tensor.name for tensor in tensors], renumbered)
    found = first.blocks
    extra = found.metadata if found else metadata  # a reordered file in stock layout says so itself
    version = extra.get(VERSION_KEY, FORMAT_VERSION)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise FormatError(
            f"{files[0][0]}: reordered by version {version} of the format, newer than this ggufmoe knows (up to "
            f"{FORMAT_VERSION})",
            hint="Install a newer ggufmoe.",
        )
    return Model(
        paths=tuple(file_path for file_path, _ in files),
        metadata=metadata,
        tensors=tensors,
        ollama_differences=differences,
        renumbered=renumbered,
        stock_offset=found.stock_offset if found else 0,
        blocks=found.facts if found else None,
        orders=bank_orders(extra),
        heat=bank_values(extra, "heat"),
    )


def without_extra_tensors(model: Model) -> Model:
    """The model without the vision and audio parts that Ollama keeps in the same file."""
    tensors = tuple(tensor for tensor in model.tensors if not is_extra_tensor(tensor.name))
    differences = ollama_differences(model.metadata, [tensor.name for tensor in tensors], model.renumbered)
    return replace(model, tensors=tensors, ollama_differences=differences)
