"""``ggufmoe replay``: routing traces against policies and budgets, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from ..errors import FormatError, UsageError
from ..moe.policies import DEFAULT_POLICY, POLICIES
from ..moe.replay import (
    Limits,
    LoadedTrace,
    RecordedRun,
    Slots,
    Tally,
    is_recorded,
    load_trace,
    optimum,
    replay_recorded,
    slots_for_budget,
    slots_for_request,
)
from ..moe.replay import replay as replay_policy
from ..moe.residents import parse_residents
from ..moe.trace import TraceHeader, read_trace
from .options import BYTES, json_option
from .output import bytes_text, one_line, print_json, print_table

DEFAULT_RESIDENTS = "12.5%,25%,50%"
OPTIMUM = "optimum"
MAX_LINE = 2**24  # characters: no step is longer, and no other file makes us read more at a time

Tallies = dict[str, dict[str, Tally]]  # policy, or the optimum -> budget -> what decoding did
Budgets = Mapping[str, Callable[[TraceHeader], Slots]]


@dataclass(frozen=True)
class _Replayed:
    """All that is printed of one trace. ``recorded`` is None where no engine recorded it."""

    path: Path
    trace: LoadedTrace
    tallies: Tallies
    recorded: RecordedRun | None

    @property
    def knows_bytes(self) -> bool:
        return all(bank.expert_bytes for bank in self.trace.header.banks)


@click.command()
@click.argument("traces", metavar="TRACE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--resident-experts",
    "residents",
    multiple=True,
    metavar="N|P%|all,...",
    help=f"Slots per layer: 8, 25% or all; a list or repeatable. Default: {DEFAULT_RESIDENTS}.",
)
@click.option(
    "--vram", "vram", type=BYTES, multiple=True, help="Memory for slots, spread over all layers; repeatable."
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(list(POLICIES)),
    multiple=True,
    help="Policy to replay; repeatable. Default: all.",
)
@click.option(
    "--max-uploads", type=click.IntRange(0), help="Uploads under way at a time, per layer. Default: no limit."
)
@click.option(
    "--delay",
    type=click.IntRange(0, 10**6),
    default=0,
    show_default=True,
    help="Steps that an upload misses; with 0 an expert is resident in the next step.",
)
@json_option(
    "Print JSON: `default_policy`; `policies.NAME.hit_rate`, 0 to 1, the mean of all traces and budgets, and "
    "`policies.NAME.by_residents` with one entry per budget; `optimum` alike; each of `traces` alone."
)
@click.pass_context
def replay(
    ctx: click.Context,
    /,
    traces: tuple[Path, ...],
    residents: tuple[str, ...],
    vram: tuple[int, ...],
    policies: tuple[str, ...],
    max_uploads: int | None,
    delay: int,
    as_json: bool,
) -> None:
    """Compare residency policies on recorded routing, without a model.

    TRACE is what `--trace` recorded, or a `route_trace v1` file. Figures are of decoding; the prefill warms the
    slots, which start empty (`static` starts with what the prefill used most). `optimum` sees the future: no
    policy can beat it. A trace that ggufmoe recorded is also decided again as it was: exit code 1 if the hits
    differ.

    \b
    Examples:
      ggufmoe replay talk.trace
      ggufmoe replay talk.trace --resident-experts 8,25% --policy lfru --policy lru
      ggufmoe replay talk.trace --vram 6GiB --max-uploads 2 --delay 1
      ggufmoe replay one.trace other.csv --json
    """
    budgets = _budgets(residents, vram)
    limits = Limits(max_uploads, delay)
    names = list(dict.fromkeys(policies)) or list(POLICIES)
    found = [_replay(path, names, budgets, limits) for path in traces]
    if as_json:
        print_json(_to_json(found, names, list(budgets), limits))
    else:
        for each in found:
            _print_trace(each, list(budgets))
        if len(found) > 1:
            click.echo(f"Mean of {len(found)} traces")
            means = {name: _means(found, name, list(budgets)) for name in (*names, OPTIMUM)}
            _print_figures("hit rate", list(budgets), means, _percent)
    differ = any(each.recorded and each.recorded.differs_at for each in found)
    ctx.exit(1 if differ else 0)


def _budgets(residents: Sequence[str], vram: Sequence[int]) -> dict[str, Callable[[TraceHeader], Slots]]:
    texts = [text.strip() for option in residents for text in option.split(",")]
    if not texts and not vram:
        texts = DEFAULT_RESIDENTS.split(",")
    budgets: dict[str, Callable[[TraceHeader], Slots]] = {
        text: partial(slots_for_request, request=parse_residents(text)) for text in texts
    }
    return {
        **budgets,
        **{bytes_text(n_bytes): partial(slots_for_budget, n_bytes=n_bytes) for n_bytes in vram},
    }


def _replay(path: Path, names: Sequence[str], budgets: Budgets, limits: Limits) -> _Replayed:
    trace = _load(path)
    slots = {}
    for label, of in budgets.items():
        try:
            slots[label] = of(trace.header)
        except UsageError as error:
            raise UsageError(f"{path}: {error}", hint=error.hint) from error
    tallies = {
        name: {label: replay_policy(trace, name, each, limits) for label, each in slots.items()}
        for name in names
    }
    tallies[OPTIMUM] = {label: optimum(trace, each) for label, each in slots.items()}
    recorded = None
    if is_recorded(trace.header):
        steps = (step for steps in trace.banks.values() for step in steps)
        try:
            recorded = replay_recorded(trace.header, steps)
        except FormatError as error:
            raise FormatError(f"{path}: {error}", hint=error.hint) from error
    return _Replayed(path, trace, tallies, recorded)


def _load(path: Path) -> LoadedTrace:
    """Raises: FormatError if the file cannot be read or is no trace."""
    if path.exists() and not path.is_file():
        raise FormatError(f"{path}: is no file")
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            trace = load_trace(read_trace(_lines(file, path), str(path)))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise FormatError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not trace.banks:
        raise FormatError(f"{path}: the trace holds no step")
    return trace


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise FormatError(f"{path}: is no routing trace: a line is longer than {MAX_LINE:,} characters")
        yield line


# Figures ------------------------------------------------------------------------------------------------


def _means(found: Sequence[_Replayed], name: str, labels: Sequence[str]) -> dict[str, float | None]:
    return {label: _mean([each.tallies[name][label].hit_rate for each in found]) for label in labels}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _per_token(each: _Replayed, number: float) -> float | None:
    return number / each.trace.n_decoded if each.trace.n_decoded else None


def _figures(each: _Replayed, tally: Tally) -> dict[str, Any]:
    return {
        "hit_rate": tally.hit_rate,
        "uploads_per_token": _per_token(each, tally.uploads),
        "bytes_per_token": _per_token(each, tally.upload_bytes) if each.knows_bytes else None,
    }


def _to_json(found: Sequence[_Replayed], names: Sequence[str], labels: Sequence[str], limits: Limits) -> Any:
    summary = {name: _summary(found, name, labels) for name in (*names, OPTIMUM)}
    return {
        "default_policy": DEFAULT_POLICY,
        "resident_experts": labels,
        "max_uploads": limits.max_pending,
        "delay": limits.delay,
        "policies": {name: summary[name] for name in names},
        OPTIMUM: summary[OPTIMUM],
        "traces": [_trace_json(each, names) for each in found],
    }


def _summary(found: Sequence[_Replayed], name: str, labels: Sequence[str]) -> dict[str, Any]:
    """Means over the traces, of each budget and of all."""
    by_residents = {}
    for label in labels:
        figures = [_figures(each, each.tallies[name][label]) for each in found]
        by_residents[label] = {key: _mean([values[key] for values in figures]) for key in figures[0]}
    rates = [values["hit_rate"] for values in by_residents.values()]
    return {"hit_rate": _mean(rates), "by_residents": by_residents}


def _trace_json(each: _Replayed, names: Sequence[str]) -> dict[str, Any]:
    header, recorded = each.trace.header, each.recorded

    def figures(name: str) -> dict[str, Any]:
        return {
            label: {
                "routings": tally.routings,
                "hits": tally.hits,
                "uploads": tally.uploads,
                **_figures(each, tally),
            }
            for label, tally in each.tallies[name].items()
        }

    return {
        "path": str(each.path),
        "model": header.model,
        "architecture": header.arch,
        "decode_tokens": each.trace.n_decoded,
        "policies": {name: figures(name) for name in names},
        OPTIMUM: figures(OPTIMUM),
        "recorded": recorded
        and {
            "policy": header.policy,
            "routings": recorded.routings,
            "hits": recorded.recorded_hits,
            "replayed_hits": recorded.replayed_hits,
            "equal": recorded.differs_at is None,
        },
    }


# Text ---------------------------------------------------------------------------------------------------


def _print_trace(each: _Replayed, labels: Sequence[str]) -> None:
    header = each.trace.header
    click.echo(one_line(each.path.name))
    shapes = sorted({f"{bank.n_used} of {bank.n_expert}" for bank in header.banks})
    click.echo(
        one_line(
            f"{header.model} ({header.arch}): {len(each.trace.banks)} layers, {', '.join(shapes[:3])} experts, "
            f"{each.trace.n_decoded:,} decoded tokens"
        )
    )
    if each.recorded:
        _print_recorded(each.recorded, header.policy or "")
    values = {
        name: {label: _figures(each, tally) for label, tally in by_label.items()}
        for name, by_label in each.tallies.items()
    }

    def column(key: str) -> dict[str, dict[str, float | None]]:
        return {name: {label: of[key] for label, of in each.items()} for name, each in values.items()}

    _print_figures("hit rate", labels, column("hit_rate"), _percent)
    _print_figures("uploads per token", labels, column("uploads_per_token"), lambda number: f"{number:.1f}")
    if each.knows_bytes:
        _print_figures("bytes per token", labels, column("bytes_per_token"), bytes_text)
    click.echo()


def _print_recorded(recorded: RecordedRun, policy: str) -> None:
    text = f"recorded with {policy}: {recorded.recorded_hits:,} hits of {recorded.routings:,} routings, "
    step = recorded.differs_at
    if step is None:
        click.echo(text + "replayed the same")
    else:
        click.echo(
            f"{text}replayed {recorded.replayed_hits:,}; they differ from step {step.step}, layer {step.layer} on"
        )


def _print_figures(
    title: str,
    labels: Sequence[str],
    values: Mapping[str, Mapping[str, float | None]],
    text: Callable[[float], str],
) -> None:
    rows = [[name, *(_cell(of[label], text) for label in labels)] for name, of in values.items()]
    print_table((title, *labels), rows)


def _cell(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
