"""``ggufmoe run``: text in, text out, at the borders of what the context holds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, ENVIRONMENT, assert_refused, endless, ggufmoe, in_process
from tiny_models import KV, rewrite, write_tiny_model

from ggufmoe.errors import UsageError
from ggufmoe.native.llama import Sampling
from ggufmoe.run.session import Session
from ggufmoe.run.setup import SessionOptions

QUICK = ("--temperature", "0", "--threads", "1")
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "text.gguf", "qwen3moe", text=True)


def facts(model: Path | str, *args: str, stdin: bytes | None = None) -> dict[str, Any]:
    outcome = in_process("run", model, *QUICK, "--json", *args, stdin=stdin)
    assert outcome.code == 0, outcome
    value: dict[str, Any] = outcome.json
    return value


# Text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 9))
def test_the_stream_is_the_whole_text(n: int) -> None:
    args = ("-p", "歪🙂é", "-n", str(n))
    streamed = in_process("run", "demo", *QUICK, *args)
    assert streamed.code == 0
    assert streamed.out == facts("demo", *args)["text"] + "\n"


@pytest.mark.parametrize("n", range(1, 9))
def test_a_character_of_several_tokens_is_shown_whole(n: int) -> None:
    text = facts("demo", "-p", "管理员可以通过命令行", "-n", str(n))["text"]
    assert "\ufffd" not in text[:-1]  # at most where the answer was cut, inside a character


def test_random_bytes_from_the_model_are_utf8_all_the_same(text_model: Path) -> None:
    args = ("-p", "hello", "-n", "60", "--temperature", "5", "--seed", "3")
    assert in_process("run", text_model, *args).out == facts(text_model, *args)["text"] + "\n"


@pytest.mark.parametrize(
    ("stdin", "prompt"),
    [
        (b"\xe6\xad", "\ufffd"),
        (b"a\xffb", "a\ufffdb"),
        (b"\xed\xa0\xbd", "\ufffd" * 3),
        (b"hello world\n", "hello world"),
        (b"hello world\r\n", "hello world"),
        (b"one\r\ntwo\n\n", "one\r\ntwo\n"),
        ("\ufeffhello".encode(), "hello"),  # a byte order mark is not part of the text
        ("a\ufeffb".encode(), "a\ufeffb"),
        ("歪🙂é".encode(), "歪🙂é"),
    ],
)
def test_standard_input_is_the_prompt(text_model: Path, stdin: bytes, prompt: str) -> None:
    from_stdin = facts(text_model, "-n", "4", stdin=stdin)
    assert from_stdin["prompt_tokens"] == facts(text_model, "-n", "4", "-p", prompt)["prompt_tokens"]
    assert from_stdin["text"] == facts(text_model, "-n", "4", "-p", prompt)["text"]


def test_a_nul_in_the_prompt_is_a_character(text_model: Path) -> None:
    with_nul = facts(text_model, "-n", "1", stdin=b"a\0b")
    assert with_nul["prompt_tokens"] == 3


def test_bytes_of_the_command_line_that_are_no_text(text_model: Path) -> None:
    for raw in (b"\xed\xa0\xbd", b"\xff", b"a\xe6\xad"):
        outcome = ggufmoe("run", text_model, *QUICK, "-n", "4", "--stop", b"zz\xfe", "--json", "-p", raw)
        assert (outcome.code, outcome.err) == (0, "")
        assert (
            outcome.json["text"] == facts(text_model, "-n", "4", "-p", raw.decode("utf-8", "replace"))["text"]
        )


def test_stop_strings() -> None:
    args = ("-p", "In the beginning", "-n", "20")
    text = facts("demo", *args)["text"]
    stop = text[7:10]
    assert facts("demo", *args, "--stop", "no such text", "--stop", stop)["text"] == text[: text.index(stop)]
    assert facts("demo", *args, "--stop", "")["text"] == text


# Counts --------------------------------------------------------------------------------------------------


def test_no_tokens_are_asked_for(text_model: Path) -> None:
    outcome = in_process("run", text_model, *QUICK, "-p", "hello world", "-n", "0")
    assert (outcome.code, outcome.out) == (0, "\n")
    assert "2 prompt tokens at " in outcome.err and "decoded" not in outcome.err
    found = facts(text_model, "-p", "hello world", "-n", "0")
    assert (found["text"], found["prompt_tokens"], found["answer_tokens"]) == ("", 2, 0)
    assert found["prefill_routings"] == (2 + 1) * 3  # the last layer computes the last token only
    assert found["decode_routings"] == 0


@pytest.mark.parametrize("n", ["0", "1"])
def test_no_rate_comes_from_nothing(text_model: Path, n: str) -> None:
    found = facts(text_model, "-p", "hello", "-n", n)
    assert found["decode_tokens_per_s"] is None and found["decode_hit_rate"] is None
    assert found["prefill_tokens_per_s"] > 0
    assert found["prompt_tokens"] == 1


def test_without_a_limit_the_context_is_filled(text_model: Path) -> None:
    found = facts(text_model, "-p", "hello", "-n", "-1", "--context", "24")
    assert found["answer_tokens"] == 24  # the last one needs no place: it is not evaluated
    assert found["decode_routings"] == 23 * 2 * 3


def test_answer_tokens_are_those_that_came(text_model: Path) -> None:
    for n in (2, 5):
        assert facts(text_model, "-p", "hello", "-n", str(n))["answer_tokens"] == n


@pytest.mark.parametrize("prompt", ["", " "])
def test_an_empty_prompt_starts_from_the_first_token(text_model: Path, prompt: str) -> None:
    assert facts(text_model, "-p", prompt, "-n", "2")["prompt_tokens"] == 1
    assert facts(text_model, "-n", "2", stdin=prompt.encode())["prompt_tokens"] == 1


# The context ---------------------------------------------------------------------------------------------


def test_zero_is_the_trained_length(text_model: Path) -> None:
    assert facts(text_model, "-p", "hello", "-n", "1", "--context", "0")["context"] == 1024


@pytest.mark.parametrize("context", [1, 8])
def test_prompts_as_long_as_the_context(text_model: Path, context: int) -> None:
    def run(n_tokens: int) -> Any:
        prompt = "a" * n_tokens
        return in_process("run", text_model, *QUICK, "--json", "--context", str(context), "-p", prompt)

    for n_tokens in (max(context - 1, 1), context):
        found = run(n_tokens)
        assert found.code == 0
        assert found.json["prompt_tokens"] == n_tokens
        assert found.json["decode_routings"] == (context - n_tokens) * 2 * 3
    assert_refused(run(context + 1), f"has {context + 1} tokens", f"holds {context}.", code=2)


def test_beyond_the_trained_length_is_warned_of(text_model: Path) -> None:
    outcome = in_process("run", text_model, *QUICK, "-p", "hello", "-n", "1", "--context", "1025")
    warning, closing = outcome.err.splitlines()
    assert outcome.code == 0
    assert warning.startswith(
        "Warning: a context of 1025 tokens is more than the 1024 "
    ) and closing.startswith("[")
    exact = in_process("run", text_model, *QUICK, "-p", "hello", "-n", "1", "--context", "1024")
    assert len(exact.err.splitlines()) == 1


@pytest.mark.parametrize("context", ["-1", str(2**32 + 1), "1.5", "many"])
def test_what_is_no_context(text_model: Path, context: str) -> None:
    outcome = in_process("run", text_model, "-p", "x", "--context", context)
    assert (outcome.code, outcome.raw_out) == (2, b"")
    assert "Invalid value for '--context'" in outcome.err


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(8, 8), (8, 4), (64, 8), (1, 1)])
def test_prompts_at_the_borders_of_batches(text_model: Path, n_batch: int, n_ubatch: int) -> None:
    def answer(n_tokens: int, options: SessionOptions) -> str:
        with Session(text_model, options) as session:
            return "".join(session.generate(list(range(65, 65 + n_tokens)), GREEDY, max_tokens=4))

    usual = SessionOptions(threads=1, context=32)
    small = SessionOptions(threads=1, context=32, n_batch=n_batch, n_ubatch=n_ubatch)
    for n_tokens in {max(size + step, 1) for size in (n_batch, n_ubatch) for step in (-1, 0, 1) if size < 32}:
        assert answer(n_tokens, small) == answer(n_tokens, usual)


def test_a_session_refuses_more_tokens_than_its_context(text_model: Path) -> None:
    with Session(text_model, SessionOptions(threads=1, context=8)) as session:
        with pytest.raises(UsageError, match="9 tokens, the context holds 8"):
            session.generate(list(range(9)))
        assert len(list(session.generate(list(range(8)), GREEDY))) == 2  # a token, and nothing held back
        with pytest.raises(UsageError, match="9 tokens, the context holds 8"):
            session.evaluate([1])


# Names ---------------------------------------------------------------------------------------------------

NAMES = [
    b"\xd0\x97\xd0\xb0\xd0\xb3\xd1\x80\xd1\x83\xd0\xb7\xd0\xba\xd0\xb8 \xe6\xa8\xa1\xe5\x9e\x8b.gguf",
    b'it\'s "q" $x #1%20.gguf',
    b"[red]x[/INST].gguf",
    b"two\nlines.gguf",
    b"\xff.gguf",
    b"x" * 245 + b".gguf",
    b"~x.gguf",
    b"demo.gguf",
]


@pytest.mark.parametrize("name", NAMES)
def test_models_of_any_name(text_model: Path, tmp_path: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    path.hardlink_to(text_model)
    found, usual = (facts(model, "-p", "hello", "-n", "2") for model in (path, text_model))
    assert found["text"] == usual["text"]


def test_names_that_look_like_something_else(text_model: Path, tmp_path: Path) -> None:
    strange = tmp_path / "Загрузки 模型 [b] \udcff"
    strange.mkdir()
    for name in ("-x.gguf", "~x.gguf"):
        (strange / name).hardlink_to(text_model)
    folders = {name: str(strange) for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")}
    for model in ("./-x.gguf", f"../{strange.name}/-x.gguf", "~x.gguf", "~/-x.gguf"):
        outcome = ggufmoe("run", *QUICK, "-p", "hello", "-n", "1", model, cwd=strange, env=folders)
        assert outcome.code == 0 and outcome.raw_out, outcome
    assert ggufmoe("run", *QUICK, "-p", "x", "-n", "1", "--", "-x.gguf", cwd=strange, env=folders).code == 0


# Endings -------------------------------------------------------------------------------------------------


@pytest.fixture
def long_answer(text_model: Path, tmp_path: Path) -> list[str]:
    model = endless(text_model, tmp_path / "endless.gguf")
    return [*COMMAND, "run", str(model), *QUICK, "-p", "hello", "-n", "-1", "--context", "100000"]


def test_ctrl_c_ends_the_answer_with_130(long_answer: list[str]) -> None:
    with subprocess.Popen(
        long_answer, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"Traceback" not in err and b"Error" not in err


def test_a_reader_that_goes_away_is_no_error(long_answer: list[str]) -> None:
    with subprocess.Popen(
        long_answer, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(1)
        process.stdout.close()
        start = time.monotonic()
        err = process.stderr.read()
        code = process.wait(timeout=10)
    assert time.monotonic() - start < 10
    assert 0 <= code < 128
    assert [line for line in err.decode().splitlines() if not line.startswith("Warning: a context")] == []


def test_a_prompt_begins_with_the_models_bos(text_model: Path, tmp_path: Path) -> None:
    path = rewrite(text_model, tmp_path / "m.gguf", keys={"tokenizer.ggml.add_bos_token": (True, KV.BOOL)})
    assert facts(path, "-p", "hello", "-n", "1")["prompt_tokens"] == 2
    assert facts(path, "-p", "", "-n", "1")["prompt_tokens"] == 1
