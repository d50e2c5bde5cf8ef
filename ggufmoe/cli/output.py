"""Text for terminals and programs: safe strings, byte sizes, tables that fit 100 columns, JSON."""

from __future__ import annotations

import json
import math
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import click

from ..errors import GgufMoeError

WIDTH = 100


def printable(text: str) -> str:
    """``text`` without what would act on a terminal: control characters and half characters are escaped."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs", "Cf")
        else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


def one_line(text: str) -> str:
    """``printable`` text whose line breaks and tabs are escaped too, as a file's name may hold them."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def error_text(error: GgufMoeError) -> str:
    """``Error: what happened. What to do next.``"""
    text = f"Error: {error}"
    if not error.hint:
        return text
    return f"{text}{'' if text.endswith(('.', '!', '?')) else '.'} {error.hint}"


def bytes_text(n_bytes: float) -> str:
    """A size as people read it: ``1.25 GiB``. Binary units, three digits."""
    size, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


def print_json(value: Any) -> None:
    """One JSON value on stdout. Strings that are no valid Unicode stay readable as escapes; infinity and NaN,
    which JSON lacks, become null."""
    click.echo(json.dumps(_finite(value), indent=2, ensure_ascii=True, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table on stdout; the first column is left-aligned text, the others are right-aligned figures.

    Cells are shown literally: no markup is read in them.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(title)) if title else None, title_justify="left", box=None, pad_edge=False
    )
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=_width())
    console.print(table)


def _width() -> int:
    return min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH) if sys.stdout.isatty() else WIDTH
