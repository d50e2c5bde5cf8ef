"""``ggufmoe convert``: one file in which every expert is a tensor of its own, and which llama.cpp still reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import FormatError, UsageError
from .options import MODEL, ModelPath, json_option
from .output import bytes_text, one_line, print_json
from .progress import byte_progress

if TYPE_CHECKING:
    from ..gguf.order import Profile
    from ..run.convert import Converted

MAX_PROFILE_BYTES = 64 << 20


class FileType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A file type by llama.cpp's name; case does not matter."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ..native.quantize import FILE_TYPES

        if str(value).upper() not in FILE_TYPES:
            self.fail(f"{value!r} is none of {', '.join(FILE_TYPES)}", param, ctx)
        return str(value).upper()


@click.command()
@click.argument("model", type=MODEL)
@click.option(
    "-o",
    "--out",
    type=ModelPath(),
    help="File to write. Default: <MODEL>-blocks.gguf (or -stock) in the current folder.",
)
@click.option(
    "--layout",
    type=click.Choice(["blocks", "stock"]),
    default="blocks",
    show_default=True,
    help="blocks: every expert is a tensor of its own, and llama.cpp's own table lies in the file. stock: that "
    "table and its data alone, for other engines.",
)
@click.option(
    "--order",
    type=click.Choice(["auto", "file", "heat"]),
    default="auto",
    show_default=True,
    help="file: as in MODEL. heat: in every layer, the experts that are used most come first. auto: heat if "
    "there is a profile.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help='Routing counts as JSON, {"layers": {"3": [12, 0, ...]}}; they are stored in the file.',
)
@click.option("--quantize", type=FileType(), help="Quantise with llama.cpp's quantizer: Q4_K_M, Q8_0, ...")
@click.option("--expert-type", type=FileType(), help="The same for the experts only.")
@click.option("--dense-type", type=FileType(), help="The same for everything else.")
@click.option("--imatrix", type=click.Path(path_type=Path), help="Importance matrix of llama-imatrix.")
@click.option("--allow-requantize", is_flag=True, help="Quantise what is quantised already; it gets worse.")
@click.option("--allow-bad-blocks", is_flag=True, help="Convert weights that are no numbers, too.")
@click.option("--verify", is_flag=True, help="Read the new file again and compare it with MODEL.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Threads that quantise. Default: physical cores."
)
@json_option("Print what was written as one JSON object.")
def convert(
    model: Path,
    out: Path | None,
    layout: str,
    order: str,
    profile: Path | None,
    quantize: str | None,
    expert_type: str | None,
    dense_type: str | None,
    imatrix: Path | None,
    allow_requantize: bool,
    allow_bad_blocks: bool,
    verify: bool,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write MODEL as one file in which every expert can be placed, read and fetched on its own.

    It runs in llama.cpp as it is, without a second copy of any weight. Shards are joined.

    \b
    Examples:
      ggufmoe convert model.gguf
      ggufmoe convert model-00001-of-00003.gguf -o model-blocks.gguf --verify
      ggufmoe convert model.gguf --order heat --profile counts.json
      ggufmoe convert model-bf16.gguf --expert-type Q4_K_M --dense-type Q8_0
    """
    from ..run.convert import ConvertOptions
    from ..run.convert import convert as write
    from ..run.quantize import Quantization

    quantization = Quantization(expert_type or quantize, dense_type or quantize, imatrix, allow_requantize)
    if imatrix and not quantization:
        raise UsageError(
            "--imatrix is for quantising.", hint="Add --quantize, --expert-type or --dense-type."
        )
    options = ConvertOptions(
        layout=layout,
        order=order,
        profile=read_profile(profile) if profile else None,
        quantization=quantization,
        force=force,
        verify=verify,
        allow_bad_blocks=allow_bad_blocks,
        threads=threads,
    )
    destination = out or default_name(model, layout)
    with byte_progress() as on_progress:
        result = write(model, destination, options, on_progress)
    if result.n_left_out:
        click.echo(
            f"Note: {result.n_left_out} tensors of a vision or audio part were left out; llama.cpp expects them "
            "in a file of their own.",
            err=True,
        )
    print_result(result, as_json, verified=verify)


def default_name(model: Path, suffix: str) -> Path:
    """``<model>-blocks.gguf`` in the current folder, without what names a shard or an earlier conversion."""
    from ..gguf.shards import SHARD_NAME, existing_file

    name = existing_file(model).name
    match = SHARD_NAME.fullmatch(name)
    stem = match["prefix"] if match else name.removesuffix(".gguf")
    for earlier in ("-blocks", "-stock"):
        stem = stem.removesuffix(earlier)
    return Path(f"{stem}-{suffix}.gguf")


def read_profile(path: Path) -> Profile:
    """Raises: FormatError if the file cannot be read or is no profile."""
    from ..gguf.order import profile_from

    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise FormatError(f"{path}: larger than any routing profile")
        return profile_from(json.loads(path.read_bytes()), path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: no routing profile: it is not JSON ({one_line(str(error))})") from error


def print_result(result: Converted, as_json: bool, *, verified: bool) -> None:
    if as_json:
        print_json(
            {
                "path": str(result.path),
                "bytes": result.n_bytes,
                "blocks": result.n_block,
                "alignment": result.block_alignment,
                "order": result.order,
                "types": list(result.types),
                "source_sha256": list(result.source_hashes),
                "left_out_tensors": result.n_left_out,
                "verified": verified,
                "matches_source": result.matches_source,
            }
        )
        return
    click.echo(one_line(str(result.path)))
    parts = [bytes_text(result.n_bytes), "/".join(result.types)]
    if result.n_block:
        parts.append(f"{result.n_block:,} blocks aligned to {result.block_alignment}, order: {result.order}")
    if verified:
        parts.append("verified")
    if result.matches_source:
        parts.append("identical to the source (SHA-256)")
    click.echo(click.style(f"[{', '.join(parts)}]", dim=True), err=True)
