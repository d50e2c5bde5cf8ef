"""``ggufmoe export``: from a block file back to the file it was made from."""

from __future__ import annotations

from pathlib import Path

import click

from .convert import default_name, print_result
from .options import MODEL, ModelPath, json_option
from .progress import byte_progress


@click.command()
@click.argument("model", type=MODEL)
@click.option(
    "-o",
    "--out",
    type=ModelPath(),
    help="File to write. Default: <MODEL>-stock.gguf in the current folder.",
)
@click.option("--verify", is_flag=True, help="Read the new file again and compare it with MODEL.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@json_option("Print what was written as one JSON object.")
def export(model: Path, out: Path | None, verify: bool, force: bool, as_json: bool) -> None:
    """Write a block file as the GGUF file it was made from: same keys, same tensors, experts in their own order.

    Without quantising in between, the result is the source, byte for byte.

    \b
    Examples:
      ggufmoe export model-blocks.gguf
      ggufmoe export model-blocks.gguf -o model.gguf --verify
    """
    from ..run.convert import export as write

    destination = out or default_name(model, "stock")
    with byte_progress() as on_progress:
        result = write(model, destination, force=force, verify=verify, on_progress=on_progress)
    print_result(result, as_json, verified=verify)
