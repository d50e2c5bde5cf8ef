"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..models import demo_model_path

F = TypeVar("F", bound=Callable[..., Any])

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


class ModelPath(click.ParamType):
    """A path, or ``demo`` for the bundled model. Whether it exists is found out when it is opened."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return demo_model_path() if value == "demo" else Path(value).expanduser()


class Bytes(click.ParamType):
    """A number of bytes with its unit: ``6GiB`` (2^30) and ``6GB`` (10^9) differ."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", str(value).strip())
        if str(value).strip() == "0":
            return 0
        units = {unit.lower(): factor for unit, factor in UNITS.items()}
        if match is None or match[2].lower() not in units:
            self.fail(f"{value!r} is not a size with its unit, for example 6GiB, 512MiB or 6GB", param, ctx)
        return int(float(match[1]) * units[match[2].lower()])


MODEL = ModelPath()
BYTES = Bytes()


def _remember_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    ctx.meta["ggufmoe.json"] = value  # meta is shared with the group, which reports errors
    return value


def json_option(text: str) -> Callable[[F], F]:
    """``--json``; errors come as JSON on stdout too."""
    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, expose_value=True, callback=_remember_json, help=text
    )
