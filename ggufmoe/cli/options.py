"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from fractions import Fraction
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


class ModelPath(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A path, or ``demo`` for the bundled model. Whether it exists is found out when it is opened."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "demo":
            return demo_model_path()
        try:
            return Path(value).expanduser()
        except RuntimeError:  # no such user, so ``~`` is a letter of the name
            return Path(value)


class Bytes(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A number of bytes with its unit: ``6GiB`` (2^30) and ``6GB`` (10^9) differ."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]+)", str(value).strip())
        if str(value).strip() == "0":
            return 0
        units = {unit.lower(): factor for unit, factor in UNITS.items()}
        if match is None or match[2].lower() not in units:
            self.fail(f"{value!r} is not a size with its unit, for example 6GiB, 512MiB or 6GB", param, ctx)
        return int(Fraction(match[1]) * units[match[2].lower()])


class PlainText(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Text for the model. Bytes that are no UTF-8 become U+FFFD."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return os.fsencode(value).decode("utf-8", "replace")


class Number(click.FloatRange):
    """A ``FloatRange`` that ``nan`` is outside of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


MODEL = ModelPath()
BYTES = Bytes()
TEXT = PlainText()
MAX_INT = 2**31 - 1  # what llama.cpp keeps such a number in
MAX_CONTEXT = 2**24


def _remember_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    ctx.meta["ggufmoe.json"] = value  # meta is shared with the group, which reports errors
    return value


def json_option(text: str) -> Callable[[F], F]:
    """``--json``; errors come as JSON on stdout too."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        expose_value=True,
        callback=_remember_json,
        help=text,
    )


class Residents(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """``8`` experts per layer, a share such as ``25%``, or ``all``."""

    name = "n|p%|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ..moe.residents import ResidentRequest, parse_residents

        return value if isinstance(value, ResidentRequest) else parse_residents(value)


class PrefetchDepth(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """``0`` to ``4``, or ``auto`` (None)."""

    name = "0-4|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "auto":
            return None
        if str(value) not in ("0", "1", "2", "3", "4"):
            self.fail(f"{value!r} is not a number of layers from 0 to 4, or 'auto'", param, ctx)
        return int(value)


class RuleText(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """``REGEX=DEVICE``"""

    name = "regex=device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ..moe.rules import Rule, parse_rule

        return value if isinstance(value, Rule) else parse_rule(value)


_SESSION_OPTIONS = (
    click.option(
        "--device",
        "devices",
        multiple=True,
        metavar="NAME",
        help="Device for dense weights and slots, by its name in `ggufmoe devices`; repeatable. 'cpu' stands in "
        "for a GPU. Default: the first GPU.",
    ),
    click.option(
        "--rpc", "rpc_endpoints", multiple=True, metavar="HOST:PORT", help="Use an RPC server; repeatable."
    ),
    click.option(
        "--resident-experts",
        "residents",
        type=Residents(),
        help="Experts per layer that stay on the device: 8, 25% or all. Default: as many as --vram holds.",
    ),
    click.option(
        "--vram",
        "vram_bytes",
        type=BYTES,
        help="Memory to use of each device, with its unit: 6GiB is 6 x 2^30, 6GB is 6 x 10^9. Default: what is "
        "free.",
    ),
    click.option(
        "--ram",
        "ram_bytes",
        type=BYTES,
        help="Memory to use of a machine without a GPU whose RAM does not hold the model: experts that do not fit "
        "are read from the disk when they are needed. Default: no limit.",
    ),
    click.option(
        "--rule",
        "rules",
        type=RuleText(),
        multiple=True,
        help=r"Where tensors go whose name the (Python) REGEX is found in; the first rule that matches wins. "
        r"Single experts too: 'blk\.7\.ffn_.*_exps\.(3|12)\.weight=CUDA0'.",
    ),
    click.option(
        "--cold-store",
        type=click.Choice(["auto", "mmap", "repack", "pinned"]),
        default="auto",
        show_default=True,
        help="Where the other experts lie: mapped from the file, repacked in RAM (faster on the CPU), or in "
        "pinned RAM (fastest to copy to a GPU).",
    ),
    click.option(
        "--policy",
        type=click.Choice(["lfru", "lru", "threshold", "static"]),
        default="lfru",
        show_default=True,
        help="Who gets a slot as the routing goes on; static: the first residents stay.",
    ),
    click.option(
        "--prefill",
        type=click.Choice(["cpu", "split", "stream"]),
        help="How prompts are computed: all on the CPU, residents on their device, or cold experts streamed "
        "through it. Default: what turns out fastest.",
    ),
    click.option(
        "--prefetch-depth",
        type=PrefetchDepth(),
        default=0,
        show_default=True,
        help="Layers ahead whose experts are named and uploaded early: 0 (off) to 4, or auto: only where it pays.",
    ),
    click.option(
        "--trace",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Record which experts every token was routed to; `ggufmoe replay` reads it.",
    ),
    click.option(
        "--routing-from",
        type=click.Path(dir_okay=False, path_type=Path),
        help="For benchmarks only: decode with the routing of a trace instead of the router's; the text means "
        "nothing.",
    ),
    click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads. Default: physical cores."),
    click.option(
        "--context",
        type=click.IntRange(0, MAX_CONTEXT),
        help="Tokens of context; 0: as many as the model was trained for. Default: those, but at most 4096.",
    ),
)


def session_options(function: F) -> F:
    """The options that say where everything goes; ``as_session_options`` makes them into one value."""
    for option in reversed(_SESSION_OPTIONS):
        function = option(function)
    return function


def as_session_options(values: dict[str, Any]) -> Any:
    """The values of ``session_options``, as keyword arguments of a command, in one ``SessionOptions``."""
    from ..moe.residents import ResidentRequest
    from ..run.setup import SessionOptions

    return SessionOptions(**{**values, "residents": values["residents"] or ResidentRequest()})


_SAMPLING_OPTIONS = (
    click.option(
        "--temperature",
        type=Number(0, 10),
        default=0.8,
        show_default=True,
        help="0 always takes the likeliest token.",
    ),
    click.option(
        "--top-k", type=click.IntRange(0, MAX_INT), default=40, show_default=True, help="0: no limit."
    ),
    click.option("--top-p", type=Number(0, 1), default=0.95, show_default=True),
    click.option("--min-p", type=Number(0, 1), default=0.05, show_default=True),
    click.option("--repeat-penalty", type=Number(0.1, 10), default=1.0, show_default=True),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Same seed, same answer."),
)


def sampling_options(function: F) -> F:
    """How tokens are chosen; the command gets one value, ``sampling``."""

    @functools.wraps(function)
    def with_sampling(**values: Any) -> Any:
        from ..native.llama import Sampling

        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
        sampling = Sampling(**{name: values.pop(name) for name in names})
        return function(sampling=sampling, **values)

    wrapped: Any = with_sampling
    for option in reversed(_SAMPLING_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]
