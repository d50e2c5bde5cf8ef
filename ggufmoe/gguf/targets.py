"""What a converted file will hold: its tensors, and where in the source files the bytes of each come from."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import FormatError
from ..native.devices import type_numbers
from ..native.metadata import MAX_HEADER_BYTES, read_start
from ..native.quantize import row_bytes
from .experts import OLD_EXPERT_NAME, BankKey, ExpertBank, TensorInfo
from .model import Model
from .order import moving_tensors
from .scanner import scan_header
from .writer import KeyRecord, TableRow, shape_data


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous piece of a source file."""

    shard: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the file to be written: the bytes of ``runs``, one after the other.

    ``shape`` is its record in a table up to the type. ``matrices`` are the original numbers of the experts
    whose matrices follow each other (or 0, 1, ... where they are no experts).
    """

    name: str
    shape: bytes
    ne: tuple[int, ...]
    source_type: str
    type_name: str
    runs: tuple[Run, ...]
    matrices: tuple[int, ...] = ()

    @property
    def source_bytes(self) -> int:
        return sum(run.n_bytes for run in self.runs)

    @property
    def n_bytes(self) -> int:
        if self.type_name == self.source_type:
            return self.source_bytes
        rows = math.prod(self.ne[1:])
        return rows * row_bytes(type_numbers()[self.type_name], self.ne[0])

    @property
    def row(self) -> TableRow:
        return TableRow(self.shape, type_numbers()[self.type_name], self.n_bytes)


@dataclass(frozen=True)
class Source:
    """A model to convert: its tables, the records of its keys, and its tensors' own spelling by name."""

    model: Model
    keys: tuple[KeyRecord, ...]
    shapes: Mapping[str, bytes]


def read_source(model: Model) -> Source:
    """The keys and shapes of a model as they stand in its files; keys of shards are left out."""
    keys: list[KeyRecord] = []
    shapes: dict[str, bytes] = {}
    for shard, path in enumerate(model.paths):
        if model.stock_offset:
            with path.open("rb") as file:
                file.seek(model.stock_offset)
                data = file.read(MAX_HEADER_BYTES)
        else:
            data = read_start(path)
        scan = scan_header(data)
        if shard == 0:
            keys = [KeyRecord(key.name, data[key.start : key.end]) for key in scan.keys]
        shapes.update((entry.name, data[entry.start : entry.type_position]) for entry in scan.tensors)
    if len(model.paths) > 1:
        keys = [key for key in keys if not key.name.startswith(b"split.")]
    return Source(model, tuple(keys), shapes)


def find_targets(source: Source, orders: Mapping[BankKey, Sequence[int]]) -> tuple[Target, ...]:
    """The tensors of the file to be written, in the order of the source.

    ``orders`` are original numbers by new position; banks that are not in it stay as they are.
    Raises: FormatError if a tensor has not one part per expert where it must.
    """
    model = source.model
    moving = moving_tensors(model)
    banks = {(bank.layer, bank.name): bank for bank in model.banks}
    targets = []
    for tensor in model.tensors:
        key = moving.get(tensor.name)
        bank = banks[key] if key else None
        order = orders.get(key, bank.experts) if key and bank else ()
        matrices = tuple(order) if len(tensor.ne) > 2 and order else _counted(tensor)
        runs: tuple[Run, ...] = (Run(tensor.shard, tensor.offset, tensor.n_bytes),)
        if bank and list(order) != list(bank.experts):
            runs = _moved(model, tensor, bank, order)
        targets.append(
            Target(
                tensor.name,
                source.shapes[tensor.name],
                tensor.ne,
                tensor.type_name,
                tensor.type_name,
                runs,
                matrices,
            )
        )
    return tuple(targets)


def _counted(tensor: TensorInfo) -> tuple[int, ...]:
    return tuple(range(math.prod(tensor.ne[2:]))) if len(tensor.ne) > 1 else ()


def _moved(model: Model, tensor: TensorInfo, bank: ExpertBank, order: Sequence[int]) -> tuple[Run, ...]:
    if tensor.ne[-1] != bank.n_expert or tensor.n_bytes % bank.n_expert:
        raise FormatError(
            f"{model.paths[tensor.shard]}: {tensor.name} {tensor.ne} has not one part for each of {bank.n_expert} "
            "experts, so their order cannot change",
            hint="Use --order file.",
        )
    size = tensor.n_bytes // bank.n_expert
    return joined(Run(tensor.shard, tensor.offset + bank.position(expert) * size, size) for expert in order)


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """``runs`` with those that continue each other made one."""
    result: list[Run] = []
    for run in runs:
        last = result[-1] if result else None
        if last and last.shard == run.shard and last.offset + last.n_bytes == run.offset:
            result[-1] = replace(last, n_bytes=last.n_bytes + run.n_bytes)
        else:
            result.append(run)
    return tuple(result)


# The layout of before April 2024 ------------------------------------------------------------------------

_OLD_STACK = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.\d+\.weight")


def merge_old_layout(source: Source) -> tuple[Model, tuple[Target, ...]]:
    """One tensor per expert, ``blk.0.ffn_gate.3.weight``, put together as the stacks that llama.cpp reads.

    Returns: the model with its stacks (whose offsets mean nothing), and the tensors to write.
    Raises: FormatError if experts are missing, or differ in type or shape.
    """
    model = source.model
    members: dict[str, dict[int, TensorInfo]] = defaultdict(dict)
    for tensor in model.tensors:
        match = OLD_EXPERT_NAME.fullmatch(tensor.name)
        if match:
            members[_stack_name(tensor.name)][int(match["expert"])] = tensor
    tensors, targets, done = [], [], set()
    for tensor in model.tensors:
        if OLD_EXPERT_NAME.fullmatch(tensor.name) is None:
            tensors.append(tensor)
            run = Run(tensor.shard, tensor.offset, tensor.n_bytes)
            kind, shape = tensor.type_name, source.shapes[tensor.name]
            targets.append(Target(tensor.name, shape, tensor.ne, kind, kind, (run,), _counted(tensor)))
        elif (name := _stack_name(tensor.name)) not in done:
            done.add(name)
            stack, target = _stacked(model, name, members[name])
            tensors.append(stack)
            targets.append(target)
    return replace(model, tensors=tuple(tensors)), tuple(targets)


def _stack_name(name: str) -> str:
    match = _OLD_STACK.fullmatch(name)
    assert match is not None
    return f"{match[1]}_exps.weight"


def _stacked(model: Model, name: str, members: Mapping[int, TensorInfo]) -> tuple[TensorInfo, Target]:
    experts = [members.get(expert) for expert in range(len(members))]
    first = next(iter(members.values()))
    for number, expert in enumerate(experts):
        if expert is None or (expert.type_name, expert.ne) != (first.type_name, first.ne):
            fault = "is missing" if expert is None else "differs from the others in type or shape"
            raise FormatError(
                f"{model.paths[0]}: expert {number} of {name} {fault}, so the old layout cannot be put together",
                hint="Fetch a newer file of this model.",
            )
    ne = (*first.ne, len(experts))
    runs = joined(Run(e.shard, e.offset, e.n_bytes) for e in experts if e is not None)
    n_bytes = first.n_bytes * len(experts)
    stack = TensorInfo(name, first.type_name, ne, n_bytes, first.shard, first.offset)
    shape = shape_data(name.encode(), ne)
    order = tuple(range(len(experts)))
    return stack, Target(name, shape, ne, first.type_name, first.type_name, runs, order)
