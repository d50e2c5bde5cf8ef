"""Chat templates: the model's own Jinja template, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any, TypedDict

from ..errors import FormatError


class Message(TypedDict):
    role: str
    content: str


def render_chat(template: str, messages: Sequence[Message], *, bos: str, eos: str) -> str:
    """The prompt for ``messages`` up to the beginning of the assistant's answer.

    Raises: FormatError with the template's line if it cannot be read or refuses the messages.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    context: dict[str, Any] = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render(messages=list(messages), **context)
    except jinja2.TemplateSyntaxError as error:
        raise FormatError(
            f"The model's chat template cannot be read (line {error.lineno}: {error.message}).",
            hint="`ggufmoe run` goes on with a text without any template.",
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise FormatError(
            f"The model's chat template does not accept this conversation: {error}",
            hint="`ggufmoe run` goes on with a text without any template.",
        ) from error
