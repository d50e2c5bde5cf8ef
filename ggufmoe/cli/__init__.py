"""The command line: arguments in, text out. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from .. import __version__
from ..errors import GgufMoeError, UsageError
from .output import error_text, one_line, print_json

# command -> module of ggufmoe.cli that defines it under that name; loaded when asked for, so that --help is quick
COMMANDS = {
    "blocks": "blocks",
    "chat": "chat",
    "convert": "convert",
    "devices": "devices",
    "export": "export",
    "inspect": "inspect",
    "replay": "replay",
    "rpc-server": "devices",
    "run": "run",
    "verify": "verify",
}

INTERRUPTED = 130


class CommandLine(click.Group):
    """Loads commands on demand, and is the one place that turns our errors into text and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name]}")
        return getattr(module, cmd_name.replace("-", "_"))  # type: ignore[no-any-return]

    def invoke(self, ctx: click.Context) -> Any:
        """Exit codes: 1 for what failed, 2 for what was asked wrongly, 130 after Ctrl-C (128 + SIGINT)."""
        try:
            return super().invoke(ctx)
        except GgufMoeError as error:
            if ctx.meta.get("ggufmoe.json"):
                print_json({"error": str(error), "hint": error.hint})
            click.echo(one_line(error_text(error)), err=True)
            ctx.exit(2 if isinstance(error, UsageError) else 1)
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal shows ^C in the middle of a line
            ctx.exit(INTERRUPTED)


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ggufmoe")
def cli() -> None:
    """Run big Mixture-of-Experts GGUF models on small GPUs: every expert placed on its own.

    MODEL is a GGUF file, any shard of a split one, a folder that holds one, or 'demo' (bundled).

    \b
    Examples:
      ggufmoe chat demo
      ggufmoe run model.gguf -p "Why is the sky blue?" --resident-experts 25%
      ggufmoe inspect model.gguf other.gguf
      ggufmoe verify model.gguf --resident-experts 50%
    """


def main() -> None:
    """Entry point of the ``ggufmoe`` command."""
    # Names of files and models may hold bytes that are no text; show them escaped instead of failing.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="ggufmoe")
