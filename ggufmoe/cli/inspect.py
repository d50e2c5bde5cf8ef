"""``ggufmoe inspect``: what a model consists of, and which of several schedules best."""

from __future__ import annotations

import itertools
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..gguf.checks import ROUTER_NAME, check_moe, expert_faults, parameter_faults
from ..gguf.model import Model, open_model
from ..moe.kv import KV_TYPES, ContextMemory, context_memory
from ..moe.sizes import Amount, LayerSizes, ModelSizes, model_sizes, schedule_order
from .options import BYTES, MODEL, json_option
from .output import WIDTH, bytes_text, print_json, print_table, printable

if TYPE_CHECKING:
    from ..gguf.badblocks import BadBlocks

DEFAULT_CONTEXT = 4096
MAX_NAME = 60


@dataclass(frozen=True)
class _Inspected:
    """All that is printed of one model. ``memory`` is None where the size of its context is unknown,
    ``bad_blocks`` where the weights were not looked at."""

    path: Path
    model: Model
    sizes: ModelSizes
    n_ctx: int
    memory: ContextMemory | None
    warnings: tuple[str, ...]
    bad_blocks: tuple[BadBlocks, ...] | None

    @property
    def layout(self) -> str:
        if self.model.has_old_expert_layout:
            return "one_tensor_per_expert"
        return "moe" if self.sizes.layers else "dense"

    @property
    def context_bytes(self) -> int:
        return self.memory.n_bytes if self.memory else 0


@click.command()
@click.argument("models", metavar="MODEL...", type=MODEL, nargs=-1, required=True)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="Tokens of context to size the KV cache for. Default: 4096, or the trained length if smaller.",
)
@click.option(
    "--kv-type", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True, help="Type of K and V."
)
@click.option(
    "--vram",
    type=BYTES,
    default="8GiB",
    show_default=True,
    help="Fast memory that the comparison of several models assumes.",
)
@click.option(
    "--check", is_flag=True, help="Read the experts too, and exit 1 if weights in them are no numbers."
)
@json_option("Print one JSON object per model, in a list `models`, and the `verdict` on several.")
@click.pass_context
def inspect(
    ctx: click.Context,
    /,
    models: tuple[Path, ...],
    context: int | None,
    kv_type: str,
    vram: int,
    check: bool,
    as_json: bool,
) -> None:
    """Show what MODEL consists of: dense weights, experts, bytes per token, KV cache.

    Of several models, say which one schedules best and why. Only the tables of the files are read, unless
    --check looks for weights that are no numbers (NaN, infinity).

    \b
    Examples:
      ggufmoe inspect demo
      ggufmoe inspect model.gguf --context 32768 --kv-type q8_0
      ggufmoe inspect one.gguf other.gguf --vram 12GiB
      ggufmoe inspect model.gguf --check --json
    """
    found = [_inspect(path, context, kv_type, check) for path in models]
    for each in found:
        for warning in each.warnings:
            click.echo(f"Warning: {_one_line(str(each.path))}: {_one_line(warning, 500)}", err=True)
    if as_json:
        print_json(_to_json(found, kv_type, vram))
    else:
        for each in found:
            _print_model(each, kv_type)
        if len(found) > 1:
            _print_comparison(found, vram)
    ctx.exit(1 if any(each.bad_blocks for each in found) else 0)


def _inspect(path: Path, context: int | None, kv_type: str, check: bool) -> _Inspected:
    model = open_model(path)
    if model.architecture and not model.has_old_expert_layout and _claims_experts(model):
        check_moe(model)  # experts that we do not recognise must not pass for a dense model
    n_ctx = context or min(DEFAULT_CONTEXT, model.get("context_length", 0) or DEFAULT_CONTEXT)
    memory = context_memory(model, n_ctx, kv_type)
    warnings = _warnings(model)
    bad = tuple(_check_weights(model)) if check else None
    warnings += [
        f"layer {blocks.layer}, {blocks.projection}"
        + ("" if blocks.expert is None else f", expert {blocks.expert}")
        + f": {blocks.n_bad_blocks} blocks hold no numbers"
        for blocks in bad or ()
    ]
    return _Inspected(path, model, model_sizes(model), n_ctx, memory, tuple(warnings), bad)


def _check_weights(model: Model) -> list[BadBlocks]:
    from ..gguf.badblocks import find_bad_blocks  # it brings NumPy, which nothing else here needs

    return find_bad_blocks(model)


def _claims_experts(model: Model) -> bool:
    return (
        bool(model.banks)
        or model.get("expert_count", 0) > 0
        or any(ROUTER_NAME.fullmatch(tensor.name) for tensor in model.tensors)
    )


def _warnings(model: Model) -> list[str]:
    warnings = []
    if not model.architecture:
        warnings.append("the file names no architecture (general.architecture), so llama.cpp cannot load it")
    if model.has_old_expert_layout:
        warnings.append("one tensor per expert, an old layout that llama.cpp no longer reads")
    elif model.banks:
        warnings += expert_faults(model)
    warnings += parameter_faults(model) if model.architecture else []
    if model.ollama_differences:
        warnings.append(f"a file made for Ollama's own engine: {'; '.join(model.ollama_differences)}")
    return warnings


# JSON ---------------------------------------------------------------------------------------------------


def _to_json(found: Sequence[_Inspected], kv_type: str, vram: int) -> dict[str, Any]:
    """The keys are a promise to programs: they may grow in number, but keep their names and meanings.

    All sizes are in bytes or in parameters; what is unknown is null. ``layers`` lists MoE layers only, and
    ``verdict.order`` names models by their place in ``models``.
    """
    result: dict[str, Any] = {"models": [_model_json(each, kv_type) for each in found]}
    if len(found) > 1:
        result["verdict"] = {
            "rule": _rule(vram),
            "fast_memory_bytes": vram,
            "order": [
                {
                    "model": index,
                    "path": str(found[index].path),
                    "slow_bytes_per_token": found[index].sizes.slow_bytes(vram, found[index].context_bytes),
                    "reason": _reason(found[index], vram),
                }
                for index in _order(found, vram)
            ],
        }
    return result


def _model_json(each: _Inspected, kv_type: str) -> dict[str, Any]:
    model, sizes, memory = each.model, each.sizes, each.memory
    amounts = {
        "dense": sizes.dense,
        "shared_experts": sizes.shared,
        "experts": sizes.experts,
        "total": sizes.total,
        "active_dense": sizes.active_dense,
        "active_experts": sizes.active_experts,
        "active": sizes.active,
    }
    return {
        "path": str(each.path),
        "files": [str(path) for path in model.paths],
        "name": model.name,
        "architecture": model.architecture,
        "layout": each.layout,
        "layers_total": sizes.n_layer,
        "moe_layers": sizes.n_moe_layer,
        "dense_layers": sizes.n_dense_layer,
        "shared_experts": sizes.n_shared,
        "parameters": {name: amount.n_params for name, amount in amounts.items()},
        "bytes": {name: amount.n_bytes for name, amount in amounts.items()},
        "layers": [_layer_json(layer) for layer in sizes.layers],
        "context": {
            "tokens": each.n_ctx,
            "trained_tokens": model.get("context_length", 0) or None,
            "kv_type": kv_type,
            "kv_bytes": memory.kv_bytes if memory else None,
            "state_bytes": memory.state_bytes if memory else None,
        },
        "warnings": list(each.warnings),
        "bad_blocks": None if each.bad_blocks is None else [asdict(blocks) for blocks in each.bad_blocks],
    }


def _layer_json(layer: LayerSizes) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "experts": layer.n_expert,
        "top_k": layer.n_used,
        "bytes_per_expert": layer.expert_bytes,
        "bytes": layer.experts.n_bytes,
        "active_bytes": layer.active.n_bytes,
        "type": layer.types,
        "draft": layer.is_draft,
    }


# Text ---------------------------------------------------------------------------------------------------


def _print_model(each: _Inspected, kv_type: str) -> None:
    model, sizes = each.model, each.sizes
    lines = [
        _one_line(str(each.path)) + (f" ({len(model.paths)} shards)" if len(model.paths) > 1 else ""),
        f"  name          {_one_line(model.name)}",
        f"  architecture  {_one_line(model.architecture) or '(none)'}",
        f"  layers        {_layers_text(each)}",
        f"  KV cache      {_context_text(each, kv_type)}",
    ]
    click.echo("\n".join(lines) + "\n")
    print_table(
        ("", "parameters", "bytes", "read per token", "share of it"),
        [_amount_row(*row, sizes.active.n_bytes) for row in _amount_rows(sizes)],
    )
    click.echo()
    if sizes.layers:
        print_table(
            ("MoE layers", "experts", "top-k", "bytes per expert", "type"),
            [_layer_row(numbers, layer) for numbers, layer in _joined(sizes.layers)],
        )
        click.echo()


def _layers_text(each: _Inspected) -> str:
    sizes = each.sizes
    if not sizes.layers:
        return f"{sizes.n_layer}, dense model: nothing to schedule"
    text = f"{sizes.n_layer}: {sizes.n_moe_layer} MoE, {sizes.n_dense_layer} dense"
    if sizes.n_shared:
        text += f"; {sizes.n_shared} shared expert{'s' if sizes.n_shared > 1 else ''} in each MoE layer"
    if each.layout == "one_tensor_per_expert":
        text += "; one tensor per expert (old layout)"
    return text


def _context_text(each: _Inspected, kv_type: str) -> str:
    size = f"{each.n_ctx:,} tokens, {kv_type}"
    if each.memory is None:
        return f"unknown for this architecture ({size})"
    state = (
        f", and {bytes_text(each.memory.state_bytes)} of recurrent state" if each.memory.state_bytes else ""
    )
    return f"{bytes_text(each.memory.kv_bytes)} ({size}){state}"


def _amount_rows(sizes: ModelSizes) -> list[tuple[str, Amount, Amount]]:
    rows = [("dense weights", sizes.dense, sizes.active_dense)]
    if sizes.n_shared:
        rows.append(("  of it shared experts", sizes.shared, sizes.active_shared))
    if sizes.layers:
        rows.append(("experts", sizes.experts, sizes.active_experts))
    return [*rows, ("total", sizes.total, sizes.active)]


def _amount_row(label: str, whole: Amount, active: Amount, active_total: int) -> list[str]:
    per_token = f"{bytes_text(active.n_bytes)} ({_count_text(active.n_params)})"
    share = _percent(active.n_bytes, active_total)
    return [label, _count_text(whole.n_params), bytes_text(whole.n_bytes), per_token, share]


def _joined(layers: Sequence[LayerSizes]) -> list[tuple[list[int], LayerSizes]]:
    """Layers with the same facts together, in order of their first one."""
    alike: dict[tuple[object, ...], list[LayerSizes]] = defaultdict(list)
    for layer in layers:
        alike[layer.n_expert, layer.n_used, layer.experts, layer.types, layer.is_draft].append(layer)
    return [([layer.layer for layer in group], group[0]) for group in alike.values()]


def _layer_row(numbers: list[int], layer: LayerSizes) -> list[str]:
    label = _ranges(numbers) + (" (draft head, not run)" if layer.is_draft else "")
    return [label, str(layer.n_expert), str(layer.n_used), bytes_text(layer.expert_bytes), layer.types]


def _ranges(numbers: Sequence[int]) -> str:
    """``1-6``, ``0, 2-4``; every second or n-th of a range is ``1-47 by 2``."""
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# Several models -----------------------------------------------------------------------------------------


def _order(found: Sequence[_Inspected], vram: int) -> list[int]:
    return schedule_order([each.sizes for each in found], vram, [each.context_bytes for each in found])


def _print_comparison(found: Sequence[_Inspected], vram: int) -> None:
    order = _order(found, vram)
    print_table(
        ("best first", "total", "per token", "from slow", "one expert", "top-k", "dense part"),
        [_comparison_row(found[index], vram) for index in order],
    )
    click.echo("\n" + textwrap.fill(_rule(vram), WIDTH))
    for place, index in enumerate(order, 1):
        click.echo(f"{place}. {_label(found[index])}")
        click.echo(textwrap.indent(textwrap.fill(_reason(found[index], vram), WIDTH - 3), "   "))


def _comparison_row(each: _Inspected, vram: int) -> list[str]:
    sizes = each.sizes
    choices = {f"{layer.n_used} of {layer.n_expert}" for layer in sizes.layers}
    return [
        _label(each),
        bytes_text(sizes.total.n_bytes),
        bytes_text(sizes.active.n_bytes),
        bytes_text(sizes.slow_bytes(vram, each.context_bytes)),
        bytes_text(sizes.largest_expert_bytes) if choices else "-",
        (choices.pop() if len(choices) == 1 else "varies") if choices else "-",
        _percent(sizes.dense.n_bytes, sizes.total.n_bytes),
    ]


def _rule(vram: int) -> str:
    return (
        f"Fewest bytes per token from slow memory come first, when {bytes_text(vram)} of fast memory hold "
        "the context, the dense weights and then as many experts as fit, every expert equally likely; ties: "
        "less read per token, then smaller experts. It says nothing about the quality of answers."
    )


def _reason(each: _Inspected, vram: int) -> str:
    sizes = each.sizes
    slow = sizes.slow_bytes(vram, each.context_bytes)
    unknown = " (the size of its context is unknown)" if each.memory is None else ""
    text = f"a token reads {bytes_text(sizes.active.n_bytes)}, " + (
        f"{bytes_text(slow)} of it from slow memory" if slow else "none of it from slow memory"
    )
    text += unknown
    if not sizes.layers:
        return f"{text}; dense model, every token needs every weight: nothing to schedule"
    used = _percent(sizes.active_experts.n_bytes, sizes.experts.n_bytes)
    return (
        f"{text}; it uses {used} of the experts' bytes, in pieces of "
        f"{bytes_text(sizes.largest_expert_bytes)}; "
        f"{_percent(sizes.dense.n_bytes, sizes.total.n_bytes)} of the model is dense"
    )


def _label(each: _Inspected) -> str:
    return _one_line(each.path.name, 32)


# Words --------------------------------------------------------------------------------------------------


def _one_line(text: str, longest: int = 0) -> str:
    """A name as one line that cannot act on the terminal, cut to ``longest`` characters if that is given."""
    line = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if not longest or len(line) <= longest else line[: longest - 1] + "…"


def _count_text(number: int) -> str:
    """A number of parameters as people say it: ``30.5 B``."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)


def _percent(part: int, whole: int) -> str:
    if not whole:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 9.95 or share == 0 else f"{share:.1f} %"
