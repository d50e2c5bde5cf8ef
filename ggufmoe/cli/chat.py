"""``ggufmoe chat``: a conversation."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..models import demo_model_path
from .options import MODEL, TEXT, as_session_options, sampling_options, session_options
from .output import error_text, one_line, printable
from .progress import progress_bar


@click.command()
@click.argument("model", type=MODEL, default="demo")
@click.option("--system", type=TEXT, help="Instructions that stand before the conversation.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(-1),
    default=512,
    show_default=True,
    help="Most tokens of one answer; -1: no limit but the context.",
)
@sampling_options
@session_options
def chat(model: Path, system: str | None, max_tokens: int, **values: Any) -> None:
    """Talk with MODEL (default: the bundled demo), by its own chat template.

    Ctrl-C stops an answer, Ctrl-D ends. Without a terminal, every line of standard input gets one answer.
    When the conversation outgrows the context, its oldest turns are left out.
    The demo model knows no conversation: it goes on with your text, in Biblical English or Python.

    \b
    Examples:
      ggufmoe chat
      ggufmoe chat model.gguf --resident-experts 25% --system "Answer briefly."
      printf 'one\\ntwo\\n' | ggufmoe chat model.gguf --temperature 0
    """
    from ..run.session import Session
    from .report import closing_line, warn

    sampling = values.pop("sampling")
    with progress_bar(f"Loading {one_line(model.name)}") as on_progress:
        session = Session(model, as_session_options(values), on_progress=on_progress)
    with session:
        warn(session)
        if model == demo_model_path():
            click.echo("The demo goes on with your text; try: In the beginning", err=True)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        while (line := _read_line()) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(session, messages, sampling, max_tokens)
            except UsageError as error:
                if not sys.stdin.isatty():
                    raise
                messages.pop()
                click.echo(one_line(error_text(error)), err=True)
                continue
            messages.append({"role": "assistant", "content": answer})
            click.echo(click.style(printable(closing_line(session)), dim=True), err=True)


def _read_line() -> str | None:
    """The user's next message; None at the end of input."""
    try:
        if sys.stdin.isatty():
            click.echo(">>> ", nl=False)
        raw = sys.stdin.buffer.readline()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        raw = b""
    if not raw:
        if sys.stdin.isatty():
            click.echo()
        return None
    return raw.decode("utf-8-sig", "replace").rstrip("\r\n")


def _answer(session: Any, messages: list[Any], sampling: Any, max_tokens: int) -> str:
    """Print an answer as it comes. Ctrl-C ends the answer, not the conversation."""
    pieces: list[str] = []
    try:
        with closing(_stream(session, messages, sampling, max_tokens)) as stream:
            for piece in stream:
                pieces.append(piece)
                click.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo(" (stopped)", nl=False, err=True)
    click.echo()
    return "".join(pieces)


def _stream(session: Any, messages: list[Any], sampling: Any, max_tokens: int) -> Any:
    """Begin an answer. The oldest turns are taken out of ``messages`` until the context holds the rest."""
    oldest = 1 if messages[0]["role"] == "system" else 0
    n_before = len(messages)
    while True:
        try:
            stream = session.chat(messages, sampling, max_tokens=max_tokens)
            break
        except UsageError:
            if len(messages) < oldest + 3:  # nothing older than the newest message is left
                raise
            del messages[oldest : oldest + 2]
    if len(messages) < n_before:
        count = (n_before - len(messages)) // 2
        click.echo(f"The context is full: the oldest {count} turns were left out.", err=True)
    return stream
