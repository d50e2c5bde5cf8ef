"""``ggufmoe run``: go on with a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from .options import MODEL, TEXT, as_session_options, json_option, sampling_options, session_options
from .output import one_line, print_json, printable
from .progress import progress_bar


@click.command()
@click.argument("model", type=MODEL)
@click.option("-p", "--prompt", type=TEXT, help="The text to go on with; without it, standard input is read.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(-1),
    default=256,
    show_default=True,
    help="Tokens to write; -1: until the model ends or the context is full.",
)
@click.option("--stop", type=TEXT, multiple=True, help="Stop where this text would appear; repeatable.")
@json_option("Print one JSON object: the text, tokens, rates and hit rate.")
@sampling_options
@session_options
def run(
    model: Path, prompt: str | None, max_tokens: int, stop: tuple[str, ...], as_json: bool, **values: Any
) -> None:
    """Go on with a text, as MODEL would.

    \b
    Examples:
      ggufmoe run demo -p "In the beginning"
      ggufmoe run model.gguf -p "def fib(n):" --resident-experts 25% --temperature 0
      echo "Once upon a time" | ggufmoe run model.gguf -n 100
      ggufmoe run model.gguf -p "Hello" --rpc 192.168.1.7:50052 --resident-experts 8
    """
    from ..run.session import Session
    from .report import closing_line, session_facts, warn

    sampling = values.pop("sampling")
    text = _prompt(prompt)
    with progress_bar(f"Loading {one_line(model.name)}") as on_progress:
        session = Session(model, as_session_options(values), on_progress=on_progress)
    with session:
        warn(session)
        pieces = []
        for piece in session.generate(text, sampling, max_tokens=max_tokens, stop=stop):
            pieces.append(piece)
            if not as_json:
                click.echo(piece, nl=False)
                sys.stdout.flush()
        if as_json:
            print_json({"text": "".join(pieces), **session_facts(session)})
        else:
            click.echo()
            click.echo(click.style(printable(closing_line(session)), dim=True), err=True)


def _prompt(prompt: str | None) -> str:
    """The prompt, or standard input without its last line break and a byte order mark.

    Bytes that are no UTF-8 become U+FFFD, as on the command line.
    """
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise UsageError("There is nothing to go on with.", hint="Give a text with -p, or on standard input.")
    text = sys.stdin.buffer.read().decode("utf-8-sig", "replace")
    return text.removesuffix("\n").removesuffix("\r")
