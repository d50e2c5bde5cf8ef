"""``ggufmoe verify``: prove that placement changed nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .options import MODEL, Number, as_session_options, json_option, session_options
from .output import print_json, print_table


@click.command()
@click.argument("model", type=MODEL)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, 2048),
    default=64,
    show_default=True,
    help="Tokens evaluated at once.",
)
@click.option(
    "--decode-tokens",
    type=click.IntRange(0, 4096),
    default=32,
    show_default=True,
    help="Tokens evaluated one by one after them.",
)
@click.option(
    "--tolerance",
    type=Number(0),
    default=0.0,
    show_default=True,
    help="Largest difference of a logit that passes. 0 is bit for bit: the same kernels, as on `cpu` or an "
    "RPC server of the same build. A GPU's kernels round differently; 0.5 is a usual bound there.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Of the random token ids for models without a tokenizer.",
)
@json_option("Print the comparison as one JSON object.")
@session_options
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    model: Path,
    prompt_tokens: int,
    decode_tokens: int,
    tolerance: float,
    seed: int,
    as_json: bool,
    **values: Any,
) -> None:
    """Compare logits and greedy tokens with stock llama.cpp on the same file; exit 1 beyond --tolerance.

    \b
    Examples:
      ggufmoe verify demo --resident-experts 25%
      ggufmoe verify model.gguf --device CUDA0 --resident-experts 16 --tolerance 0.5
    """
    from ..gguf.checks import check_runnable
    from ..gguf.model import open_model
    from ..run import verify as comparison

    tables = open_model(model)
    check_runnable(tables)
    result = comparison.verify(
        tables, as_session_options(values), n_prompt=prompt_tokens, n_decode=decode_tokens, seed=seed
    )
    passed = result.within(tolerance)
    if as_json:
        print_json({"passed": passed, "tolerance": tolerance, **asdict(result)})
    else:
        _print(result, tolerance, passed)
    ctx.exit(0 if passed else 1)


def _print(result: Any, tolerance: float, passed: bool) -> None:
    first = "none" if result.first_difference is None else f"token {result.first_difference}"
    hits = "-" if result.decode_hit_rate is None else f"{result.decode_hit_rate:.1%}"
    rows = [
        ["tokens compared", f"{result.n_prompt} prefill + {result.n_decode} decode"],
        ["largest difference of a logit", f"{result.max_difference:.6g} (tolerance {tolerance:g})"],
        [
            "KL divergence, mean / largest",
            f"{result.mean_kl_divergence:.3g} / {result.max_kl_divergence:.3g}",
        ],
        ["same likeliest token", f"{result.top1_agreement:.1%}"],
        ["first differing token", first],
        ["decode hit rate", hits],
    ]
    if result.n_not_finite:
        rows.append(["tokens with logits that are not finite", str(result.n_not_finite)])
    print_table(["verify", "PASSED" if passed else "FAILED"], rows)
