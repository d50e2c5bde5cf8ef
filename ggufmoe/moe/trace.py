"""Routing traces: what the router chose, step by step, and what the engine made of it.

Our own format (docs/trace.md) is written while a model runs and holds enough to replay the run exactly. The
``route_trace v1`` CSV of other tools is read too. Reading and writing are streams; a file is never held whole.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TextIO

from ..errors import FormatError
from .residents import BankKey

MAGIC = "ggufmoe-trace"
VERSION = 1
CSV_MAGIC = "# route_trace v"
CSV_VERSION = 1
CSV_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")
MAIN_BANK = "exps"

# What a replay may be asked to allocate for: far above every model there is.
MAX_EXPERTS = 4096
MAX_BANKS = 4096
MAX_NUMBER = 2**53

_MODEL_LINE = re.compile(r"# model=(.*) arch=(\S+) n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)\s*")
_LAYER_LINE = re.compile(r"# layer=(\d+) expert_bytes=(\d+)\b.*")


@dataclass(frozen=True, slots=True)
class TraceBank:
    """The routed experts of one layer. ``n_slots`` is None and ``residents`` empty where no engine ran.

    ``residents`` are those at the start, in the order the policy got them. ``expert_bytes``: 0 if unknown.
    """

    layer: int
    bank: str
    n_expert: int
    n_used: int
    expert_bytes: int = 0
    n_slots: int | None = None
    residents: tuple[int, ...] = ()

    @property
    def key(self) -> BankKey:
        return self.layer, self.bank


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """``policy`` and ``max_pending`` are what the engine ran with; None where no engine ran."""

    model: str
    arch: str
    n_layer: int
    banks: tuple[TraceBank, ...]
    policy: str | None = None
    max_pending: int | None = None

    @property
    def by_key(self) -> dict[BankKey, TraceBank]:
        return {bank.key: bank for bank in self.banks}


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step of one bank. ``tokens`` holds each token's experts in the router's order.

    ``committed`` and ``abandoned``: uploads that ended since the bank's last step, in their order; first the
    commits, then the others. ``max_pending``: the policy's limit in this step, None if it is the header's.
    ``hits``: routings that a slot answered, None if nobody counted.
    """

    step: int
    is_prefill: bool
    layer: int
    bank: str
    tokens: tuple[tuple[int, ...], ...]
    committed: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    max_pending: int | None = None
    hits: int | None = None

    @property
    def key(self) -> BankKey:
        return self.layer, self.bank

    @property
    def n_routings(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class Trace:
    """A header and the steps behind it; ``steps`` can be read once."""

    header: TraceHeader
    steps: Iterator[TraceStep]


class TraceWriter:
    """Writes our own format, a line at a time. The file stays the caller's."""

    def __init__(self, file: TextIO, header: TraceHeader) -> None:
        self._file = file
        about = {field.name: getattr(header, field.name) for field in fields(header) if field.name != "banks"}
        lines = [f"{MAGIC} {VERSION}", json.dumps(about)]
        lines += [json.dumps(asdict(bank), separators=(",", ":")) for bank in header.banks]
        file.write("\n".join(lines) + "\n")

    def write(self, step: TraceStep) -> None:
        self._file.write(step_line(step) + "\n")


def step_line(step: TraceStep) -> str:
    """``12 d 1 3 exps 5,8,1 c=3,7 h=2``"""
    tokens = ";".join(_joined(token) for token in step.tokens)
    phase = "p" if step.is_prefill else "d"
    line = f"{step.step} {phase} {len(step.tokens)} {step.layer} {step.bank} {tokens}"
    if step.committed:
        line += f" c={_joined(step.committed)}"
    if step.abandoned:
        line += f" a={_joined(step.abandoned)}"
    if step.max_pending is not None:
        line += f" m={step.max_pending}"
    if step.hits is not None:
        line += f" h={step.hits}"
    return line


def _joined(experts: Iterable[int]) -> str:
    return ",".join(map(str, experts))


def read_trace(lines: Iterable[str], name: str = "trace") -> Trace:
    """Reads lines, such as an open text file's, of either format. The steps come as they are asked for.

    Raises: FormatError, naming the line, for what is no trace, for a newer version, and for every bad line.
    """
    numbered = _Lines(lines, name)
    first = numbered.next_line()
    if first.startswith(CSV_MAGIC):
        numbered.check_version(first[len(CSV_MAGIC) :], CSV_VERSION)
        return _read_csv(numbered)
    magic, _, version = first.partition(" ")
    if magic != MAGIC:
        raise numbered.error(
            f"is no routing trace: it begins with neither {MAGIC!r} nor {CSV_MAGIC.rstrip('v ')!r}"
        )
    numbered.check_version(version, VERSION)
    header = _read_header(numbered)
    return Trace(header, _read_steps(numbered, header.by_key))


class _Lines:
    """Lines with their numbers; the one that was read last is the one that an error names."""

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self._lines = iter(lines)
        self._name = name
        self._pushed: str | None = None
        self._ends = False
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._pushed is not None:
            line, self._pushed = self._pushed, None
            return line
        line = next(self._lines)
        self.number += 1
        if self._ends and not line.endswith("\n"):
            raise self.error("the file ends inside this line", "The run that wrote it may have been cut off.")
        self._ends = line.endswith("\n")
        return line.rstrip("\r\n")

    def next_line(self) -> str:
        """Raises: FormatError at the end of the file."""
        for line in self:
            return line
        raise self.error("the file ends before its first step")

    def push(self, line: str) -> None:
        self._pushed = line

    def error(self, what: str, hint: str | None = None) -> FormatError:
        return FormatError(f"{self._name}: line {max(self.number, 1):,}: {what}", hint=hint)

    def check_version(self, text: str, known: int) -> None:
        number = self.natural(text.strip(), "version")
        if number > known:
            raise self.error(f"version {number} of the trace format is newer than {known}", "Update ggufmoe.")
        if number < 1:
            raise self.error("there is no version 0 of the trace format")

    def natural(self, text: str, what: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 16):
            raise self.error(f"{_shown(text)} is no {what}")
        return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")


# Our own format -----------------------------------------------------------------------------------------


def _read_header(lines: _Lines) -> TraceHeader:
    about = _json_object(lines, lines.next_line())
    header = TraceHeader(
        _text(lines, about, "model"),
        _text(lines, about, "arch"),
        _number(lines, about, "n_layer"),
        (),
        None if about.get("policy") is None else _text(lines, about, "policy"),
        None if about.get("max_pending") is None else _number(lines, about, "max_pending"),
    )
    banks: dict[BankKey, TraceBank] = {}
    for line in lines:
        if not line.startswith("{"):
            lines.push(line)
            break
        bank = _bank(lines, _json_object(lines, line))
        if bank.key in banks or len(banks) >= MAX_BANKS:
            raise lines.error(
                f"layer {bank.layer} has its bank {bank.bank!r} twice, or there are too many banks"
            )
        banks[bank.key] = bank
    return replace(header, banks=tuple(banks.values()))


def _bank(lines: _Lines, values: dict[str, Any]) -> TraceBank:
    n_expert = _number(lines, values, "n_expert", MAX_EXPERTS)
    n_used = _number(lines, values, "n_used", n_expert)
    n_slots = None if values.get("n_slots") is None else _number(lines, values, "n_slots", n_expert)
    residents = values.get("residents", [])
    if not isinstance(residents, list) or len(residents) > (n_slots or 0):
        raise lines.error("more residents than slots")
    for expert in residents:
        if type(expert) is not int or not 0 <= expert < n_expert:
            raise lines.error(f"a resident {_shown(str(expert))} of {n_expert} experts")
    if len(set(residents)) != len(residents):
        raise lines.error("an expert is resident twice")
    name = _text(lines, values, "bank")
    if not name or re.search(r"\s", name):
        raise lines.error(f"{_shown(name)} is no name of a bank")
    return TraceBank(
        _number(lines, values, "layer"),
        name,
        n_expert,
        n_used,
        _number(lines, {"expert_bytes": 0, **values}, "expert_bytes"),
        n_slots,
        tuple(residents),
    )


def _json_object(lines: _Lines, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise lines.error(f"the header's JSON cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise lines.error("the header must be JSON objects")
    return value


def _text(lines: _Lines, values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise lines.error(f"the header has no text {key!r}")
    return value


def _number(lines: _Lines, values: dict[str, Any], key: str, largest: int = MAX_NUMBER) -> int:
    value = values.get(key)
    if type(value) is not int or not 0 <= value <= largest:
        raise lines.error(f"the header has no number {key!r} of 0 to {largest:,}")
    return value


def _read_steps(lines: _Lines, banks: dict[BankKey, TraceBank]) -> Iterator[TraceStep]:
    previous = 0
    for line in lines:
        step = _parse_step(lines, line, banks)
        if step.step < previous:
            raise lines.error(f"step {step.step} comes after step {previous}")
        previous = step.step
        yield step


def _parse_step(lines: _Lines, line: str, banks: dict[BankKey, TraceBank]) -> TraceStep:
    parts = line.split(" ")
    if len(parts) < 6 or parts[1] not in ("p", "d"):
        raise lines.error(
            f"{_shown(line)} is no step: number, p or d, tokens, layer, bank, experts are expected"
        )
    step, n_tokens, layer = (lines.natural(parts[index], "number") for index in (0, 2, 3))
    bank = banks.get((layer, parts[4]))
    if bank is None:
        raise lines.error(f"the header has no bank {_shown(parts[4])} of layer {layer}")
    tokens = tuple(_experts(lines, token, bank.n_expert) for token in parts[5].split(";"))
    if len(tokens) != n_tokens or any(len(token) != bank.n_used for token in tokens):
        raise lines.error(f"{n_tokens} tokens of {bank.n_used} experts each are expected")
    options: dict[str, str] = {}
    for part in parts[6:]:
        key, equals, value = part.partition("=")
        if key not in ("c", "a", "m", "h") or not equals or key in options:
            raise lines.error(f"{_shown(part)} is not understood")
        options[key] = value
    hits = lines.natural(options["h"], "number of hits") if "h" in options else None
    if hits is not None and hits > n_tokens * bank.n_used:
        raise lines.error(f"{hits} hits among {n_tokens * bank.n_used} routings")
    return TraceStep(
        step,
        parts[1] == "p",
        layer,
        bank.bank,
        tokens,
        _experts(lines, options["c"], bank.n_expert) if "c" in options else (),
        _experts(lines, options["a"], bank.n_expert) if "a" in options else (),
        lines.natural(options["m"], "limit") if "m" in options else None,
        hits,
    )


def _experts(lines: _Lines, text: str, n_expert: int) -> tuple[int, ...]:
    """``5,8,1``: distinct experts."""
    experts = tuple(lines.natural(each, "expert") for each in text.split(","))
    if max(experts) >= n_expert or len(set(experts)) != len(experts):
        raise lines.error(f"{_shown(text)} names an expert twice, or one that {n_expert} experts do not have")
    return experts


# route_trace v1 -----------------------------------------------------------------------------------------


def _read_csv(lines: _Lines) -> Trace:
    match = _MODEL_LINE.fullmatch(lines.next_line())
    if match is None:
        raise lines.error("model, arch, n_layer, n_expert and n_expert_used are expected here")
    n_layer, n_expert, n_used = (lines.natural(match[index], "number") for index in (3, 4, 5))
    if n_layer > MAX_BANKS or n_expert > MAX_EXPERTS or n_used > n_expert:
        raise lines.error(f"{n_layer} layers with {n_used} of {n_expert} experts cannot be")
    expert_bytes: dict[int, int] = {}
    line = lines.next_line()
    while line.startswith("#"):
        layer_match = _LAYER_LINE.fullmatch(line)
        if layer_match:
            layer = lines.natural(layer_match[1], "layer")
            expert_bytes[layer] = lines.natural(layer_match[2], "number of bytes")
            if layer >= n_layer:
                raise lines.error(f"layer {layer} of {n_layer}")
        line = lines.next_line()
    columns = line.split(",")
    if tuple(columns[: len(CSV_COLUMNS)]) != CSV_COLUMNS:
        raise lines.error(f"the columns {','.join(CSV_COLUMNS)} are expected here")
    banks = tuple(
        TraceBank(layer, MAIN_BANK, n_expert, n_used, expert_bytes.get(layer, 0))
        for layer in (expert_bytes or range(n_layer))
    )
    model = re.split(r"[/\\]", match[1])[-1]
    header = TraceHeader(model, match[2], n_layer, banks)
    return Trace(header, _read_csv_steps(lines, header.by_key))


def _read_csv_steps(lines: _Lines, banks: dict[BankKey, TraceBank]) -> Iterator[TraceStep]:
    """Rows of one turn, step and layer are one step; steps are counted on through all turns."""
    place = (-1, -1)
    number = -1
    rows = (_parse_row(lines, line.split(",")) for line in lines)
    for (turn, phase, step, layer), group in itertools.groupby(rows, key=lambda row: row[0]):
        if (turn, step) != place:
            place, number = (turn, step), number + 1
        bank = banks.get((layer, MAIN_BANK))
        if bank is None:
            raise lines.error(f"the header has no layer {layer}")
        experts = tuple(expert for _, expert in group)
        if max(experts) >= bank.n_expert or len(experts) > bank.n_used or len(set(experts)) != len(experts):
            raise lines.error(
                f"layer {layer} of step {step} routes {_shown(_joined(experts))}: more than {bank.n_used}, one "
                f"twice, or one that {bank.n_expert} experts do not have"
            )
        yield TraceStep(number, phase == 0, layer, MAIN_BANK, (experts,))


def _parse_row(lines: _Lines, row: list[str]) -> tuple[tuple[int, int, int, int], int]:
    if len(row) < len(CSV_COLUMNS):
        raise lines.error(f"{len(row)} columns instead of at least {len(CSV_COLUMNS)}")
    turn, phase, step, layer, _, expert = (lines.natural(each, "number") for each in row[: len(CSV_COLUMNS)])
    if phase > 1:
        raise lines.error(f"phase {phase} is neither 0 (prefill) nor 1 (decode)")
    return (turn, phase, step, layer), expert
