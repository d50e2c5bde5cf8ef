"""``ggufmoe blocks``: every expert of every projection, and where it lies."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import MODEL, as_session_options, json_option, session_options
from .output import bytes_text, one_line, print_json, print_table

if TYPE_CHECKING:
    from ..gguf.blocks import Block
    from ..gguf.model import Model

MANY = 200


class Regex(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A Python regular expression that is searched for."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, re.Pattern):
            return value
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what a later Python may read differently
                return re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            self.fail(f"{value!r} is not a regular expression: {error}", param, ctx)


@click.command()
@click.argument("model", type=MODEL)
@click.option(
    "--filter", "pattern", type=Regex(), help=r"Only blocks whose name this is found in: 'blk\.7\.ffn_up'."
)
@click.option("--limit", type=click.IntRange(0), help=f"Lines to print; 0: all. Default: {MANY}.")
@json_option("Print all blocks as one JSON object.")
@session_options
def blocks(
    model: Path, pattern: re.Pattern[str] | None, limit: int | None, as_json: bool, **values: Any
) -> None:
    """List the blocks of MODEL: layer, expert, projection, type, offset in the file, bytes and heat.

    A file that was not converted has them too, without tensors of their own. Experts have their original
    numbers, whatever their order in the file. Options for placement show where a session would put them.

    \b
    Examples:
      ggufmoe blocks model-blocks.gguf
      ggufmoe blocks model.gguf --filter 'blk\\.7\\.' --json
      ggufmoe blocks model.gguf --resident-experts 25% --device CUDA0
    """
    from ..gguf.blocks import list_blocks
    from ..gguf.checks import check_moe
    from ..gguf.model import open_model

    tables = open_model(model)
    check_moe(tables)
    found = [
        block
        for block in list_blocks(tables.banks, tables.heat)
        if pattern is None or pattern.search(block.name)
    ]
    device = _devices(tables, values)
    if as_json:
        print_json(_json(tables, found, device))
    else:
        _print(tables, found, device, MANY if limit is None else limit)


def _devices(model: Model, values: dict[str, Any]) -> Callable[[Block], str] | None:
    """Where a session with these options would hold a block; None if no placement was asked for."""
    asked = ("devices", "rpc_endpoints", "residents", "vram_bytes", "rules")
    if not any(values[name] for name in asked):
        return None
    from ..run.setup import prepare

    setup = prepare(model, as_session_options(values))
    places = {
        (layer, bank, expert): setup.slot_devices[index].name
        for (layer, bank), members in setup.placement.residents.items()
        for expert, index in members
    }
    return lambda block: places.get((block.layer, block.bank, block.expert), "CPU")


def _json(model: Model, found: list[Block], device: Callable[[Block], str] | None) -> dict[str, Any]:
    facts = model.blocks
    return {
        "path": str(model.paths[0]),
        "files": [str(path) for path in model.paths],
        "block_file": facts is not None,
        "version": facts.version if facts else None,
        "order": facts.order if facts else "file",
        "alignment": facts.alignment if facts else None,
        "source": (
            {"names": list(facts.source_names), "sha256": list(facts.source_hashes)} if facts else None
        ),
        "count": len(found),
        "bytes": sum(block.n_bytes for block in found),
        "blocks": [
            {
                "name": block.name,
                "layer": block.layer,
                "expert": block.expert,
                "projection": block.projection,
                "type": block.type_name,
                "file": block.shard,
                "offset": block.offset,
                "bytes": block.n_bytes,
                "heat": block.heat,
                **({"device": device(block)} if device else {}),
            }
            for block in found
        ],
    }


def _print(model: Model, found: list[Block], device: Callable[[Block], str] | None, limit: int) -> None:
    facts = model.blocks
    kind = (
        f"block file, order: {facts.order}, blocks aligned to {facts.alignment}"
        if facts
        else "stock layout (not converted)"
    )
    n_bytes = bytes_text(sum(block.n_bytes for block in found))
    click.echo(one_line(str(model.paths[0])))
    click.echo(f"{kind}; {len(found):,} blocks, {n_bytes}\n")
    shown = found[:limit] if limit else found
    columns = ["block", "layer", "expert", "type", "offset", "bytes", "heat", *(["device"] if device else [])]
    rows = [
        [
            block.name,
            str(block.layer),
            str(block.expert),
            block.type_name,
            f"{block.offset:,}" + (f" ({block.shard + 1})" if len(model.paths) > 1 else ""),
            f"{block.n_bytes:,}",
            "-" if block.heat is None else f"{block.heat:g}",
            *([device(block)] if device else []),
        ]
        for block in shown
    ]
    print_table(columns, rows)
    if len(shown) < len(found):
        click.echo(f"\n{len(found) - len(shown):,} more; --limit 0 prints all, --json too.", err=True)
