"""Chat templates: what they may do, and what is said of one that cannot be used."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tiny_models import KV, rewrite, write_tiny_model

from ggufmoe.errors import FormatError
from ggufmoe.native.llama import Sampling
from ggufmoe.run.session import Session
from ggufmoe.run.setup import SessionOptions
from ggufmoe.run.template import Message, render_chat

MESSAGES: list[Message] = [{"role": "user", "content": "hi [/INST]"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(template: str, messages: list[Message] | None = None) -> str:
    return render_chat(template, messages or MESSAGES, bos="<s>", eos="</s>")


def refused(template: str) -> str:
    with pytest.raises(FormatError) as error:
        render(template)
    assert error.value.hint and "ggufmoe run" in error.value.hint
    return str(error.value)


def test_a_usual_template() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi [/INST]<|im_end|>\n<|im_start|>assistant\n"
    assert render("{{ bos_token }}{{ messages[0]['content'] | trim }}{{ eos_token }}") == "<s>hi [/INST]</s>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi [/INST]"}]'),
        ("{{ {'b': '<é>', 'a': 1} | tojson(ensure_ascii=False, sort_keys=True) }}", '{"a": 1, "b": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 3 * 4.0 }}{{ [0] * 2 }}", "---102412.0[0, 0]"),
        ("{% if tools %}tools{% endif %}{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_use(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\nb {{ x }\n", "line 2"),
        ("{% for m in messages %}\n\n{{ m }}", "line 3"),
        ("{{ messages[0].content }}\n{% nonsense %}", "line 2: Encountered unknown tag 'nonsense'"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested"),
        ("{{ " + "(" * 5000, "recursion"),
    ],
)
def test_a_template_that_cannot_be_read(template: str, said: str) -> None:
    message = refused(template)
    assert message.startswith("The model's chat template cannot be read (") and said in message


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("\n{{ raise_exception('roles must alternate') }}", "(line 2): roles must alternate"),
        ("\n\n{{ messages[3].content }}", "(line 3)"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ '{0}{1}'.format(1) }}", "(line 1)"),
        ("{{ messages | nonsense }}", "nonsense"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails(template: str, said: str) -> None:
    message = refused(template)
    assert message.startswith("The model's chat template ") and said in message


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
    ],
)
def test_the_sandbox_keeps_templates_from_pythons_objects(template: str) -> None:
    assert "unsafe" in refused(template)


@pytest.mark.parametrize(
    "template",
    ["{{ ''|attr('__class__') }}", "{{ strftime_now.__code__ }}", "{{ '{0.__class__}'.format(1) }}"],
)
def test_other_ways_to_them_are_undefined(template: str) -> None:
    assert render(template) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(999) | list %}{% for a in r %}{% for b in r %}{% for c in r %}{{ a }}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 999999999 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set ns = namespace(x=99) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    ],
)
def test_hostile_templates_end_soon(template: str) -> None:
    start = time.thread_time()
    refused(template)
    assert time.thread_time() - start < 2.5
    assert sys.gettrace() is None


def test_a_large_template_is_no_hostile_one() -> None:
    start = time.thread_time()
    assert len(render("{# comment #}text\n" * 50_000)) > 200_000
    many: list[Message] = [{"role": "user", "content": "word " * 50}] * 2000
    assert len(render(CHATML, many)) > 500_000
    assert time.thread_time() - start < 5


# Through a model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "text.gguf", "qwen3moe", text=True)


def prompt_of(model: Path, messages: list[Message]) -> tuple[list[int], int, str]:
    """What the KV cache holds after one evaluated conversation, the model's BOS, and the prompt as text."""
    with Session(model, SessionOptions(threads=1, context=256)) as session:
        assert list(session.chat(messages, Sampling(temperature=0), max_tokens=0))[-1] == ""
        pieces = b"".join(session.llama.piece(token, special=True) for token in session.tokens)
        return session.tokens, session.llama.bos, pieces.decode()


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML, "<|endoftext|>" + CHATML])
def test_a_conversation_begins_with_one_bos_at_most(
    text_model: Path, tmp_path: Path, template: str, adds_bos: bool
) -> None:
    keys = {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": (adds_bos, KV.BOOL)}
    tokens, bos, _ = prompt_of(rewrite(text_model, tmp_path / "m.gguf", keys=keys), MESSAGES)
    expected = 1 if adds_bos or template != CHATML else 0
    assert tokens.count(bos) == expected and (tokens[0] == bos) == bool(expected)


def test_the_control_tokens_of_a_template_are_tokens(text_model: Path, tmp_path: Path) -> None:
    path = rewrite(text_model, tmp_path / "m.gguf", keys={"tokenizer.chat_template": CHATML})
    tokens, _, prompt = prompt_of(path, MESSAGES)
    assert prompt == render(CHATML)
    assert len(tokens) < len(prompt) - 30  # each <|im_start|> and <|im_end|> is one


def test_without_a_template_the_text_goes_on(text_model: Path) -> None:
    assert prompt_of(text_model, [*MESSAGES, {"role": "user", "content": "x"}])[2] == "hi [/INST]\nx"
