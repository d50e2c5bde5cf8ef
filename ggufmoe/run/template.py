"""Chat templates: the model's own Jinja template, rendered in a sandbox and within a limit of time.

A template comes with a file from the internet. The sandbox keeps it from Python's inner objects, ``range`` from
being huge, and the limit of time from loops inside loops.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from ..errors import FormatError

LIMIT_S = 1.0  # of CPU time; a usual template takes some milliseconds
MAX_LENGTH = 1_000_000  # of text or a list that one ``*`` makes
MAX_NUMBER = 2**64

HINT = "`ggufmoe run` goes on with a text without any template."


class Message(TypedDict):
    role: str
    content: str


def render_chat(template: str, messages: Sequence[Message], *, bos: str, eos: str) -> str:
    """The prompt for ``messages`` up to the beginning of the assistant's answer.

    Raises: FormatError with the template's line if it cannot be read, refuses the messages or never ends.
    """
    import jinja2

    context: dict[str, Any] = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True}
    try:
        compiled = _environment().from_string(template)
    except Exception as error:  # jinja2's own, and what Python's compiler thinks of the nesting
        reason = str(error).rstrip(".")
        if isinstance(error, jinja2.TemplateSyntaxError):
            reason = f"line {error.lineno}: {(error.message or '').rstrip('.')}"
        raise FormatError(f"The model's chat template cannot be read ({reason}).", hint=HINT) from error
    try:
        with _time_limit():
            text: str = compiled.render(messages=list(messages), **context)
    except Exception as error:  # whatever the template did: an index, a division, a call without end
        reason = str(error) or type(error).__name__
        raise FormatError(
            f"The model's chat template does not accept this conversation{_line(error)}: {reason}", hint=HINT
        ) from error
    return text


def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            are_numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
            a, b = (len(each) if hasattr(each, "__len__") else abs(each) for each in (left, right))
            if operator == "**":
                too_large = b * math.log2(max(a, 1)) > 64
            else:
                too_large = a * b > (MAX_NUMBER if are_numbers else MAX_LENGTH)
            if too_large:
                raise jinja2.TemplateRuntimeError(f"the result of {operator} would be too large")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` as transformers has it, which templates are written for."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError from within the block's Python code once this thread has computed for ``LIMIT_S``."""
    end, before = time.thread_time() + LIMIT_S, sys.gettrace()

    def check(frame: Any, event: str, argument: Any) -> Any:
        if time.thread_time() > end:
            raise TimeoutError(f"it does not end within {LIMIT_S:g} s")
        return check

    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


def _line(error: Exception) -> str:
    """Where in the template an error came up; jinja2 puts the template's lines into the traceback."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"
    ]
    return f" (line {lines[-1]})" if lines else ""
