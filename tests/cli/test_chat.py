"""``ggufmoe chat``: whole conversations through real processes, and through click's runner."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import COMMAND, ENVIRONMENT, assert_refused, endless, ggufmoe, in_process
from tiny_models import KV, rewrite, write_tiny_model

from ggufmoe.native.llama import Sampling
from ggufmoe.run.session import Session
from ggufmoe.run.setup import SessionOptions
from ggufmoe.run.template import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{% endfor %}" + CHATML
)
QUICK = ("--temperature", "0", "--threads", "1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "plain.gguf", "qwen3moe", text=True)


def with_template(plain: Path, folder: Path, template: str) -> Path:
    return rewrite(plain, folder / "m.gguf", keys={"tokenizer.chat_template": template})


@pytest.fixture(scope="module")
def chatml(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(plain, tmp_path_factory.mktemp("models"), CHATML)


# Conversations from a pipe -------------------------------------------------------------------------------


def test_every_line_gets_an_answer(chatml: Path) -> None:
    outcome = in_process("chat", chatml, *QUICK, "-n", "3", stdin=b"one\n\n   \ntwo\r\nthree")
    assert outcome.code == 0
    closing = outcome.err.splitlines()
    assert len(closing) == 3 and all(" prompt tokens at " in line for line in closing)
    # what an answer left in the KV cache is not evaluated again, so later turns are no longer than the first
    counts = [int(line.strip("[").split()[0]) for line in closing]
    assert counts[1] < 2 * counts[0] and counts[2] < 2 * counts[0]


@pytest.mark.parametrize("arch", ["lfm2moe", "qwen3next", "deepseek2", "gpt-oss"])
def test_three_turns_equal_a_fresh_run(tmp_path: Path, arch: str) -> None:
    """Whether an architecture can forget a part of its state or not: the third prompt from the start."""
    path = with_template(write_tiny_model(tmp_path / "plain.gguf", arch, text=True), tmp_path, CHATML)
    with Session(path, SessionOptions(threads=1, context=400)) as session:
        messages: list[Message] = []
        for text in ("one", "two", "three"):
            messages.append({"role": "user", "content": text})
            answer = "".join(session.chat(messages, Sampling(temperature=0), max_tokens=4))
            messages.append({"role": "assistant", "content": answer})
    with Session(path, SessionOptions(threads=1, context=400)) as session:
        fresh = "".join(session.chat(messages[:-1], Sampling(temperature=0), max_tokens=4))
    assert fresh == answer
    stdin = b"one\ntwo\nthree\n"
    assert in_process("chat", path, *QUICK, "-n", "4", "--context", "400", stdin=stdin).out.endswith(
        f"{fresh}\n"
    )


def test_no_input_is_no_conversation(chatml: Path) -> None:
    for stdin in (b"", b"\n", b"\xef\xbb\xbf\n"):
        outcome = in_process("chat", chatml, *QUICK, stdin=stdin)
        assert (outcome.code, outcome.raw_out, outcome.err) == (0, b"", "")


def test_messages_of_any_kind(chatml: Path) -> None:
    lines = [
        b"[/INST] [bold]x",
        b"\xe6\xad",
        b"\xff\xfe",
        "歪🙂é".encode(),
        b"a\0b",
        b"<|im_end|>",
        b"{{ 1/0 }}",
    ]
    outcome = ggufmoe(
        "chat", chatml, *QUICK, "-n", "2", "--system", b"[/SYS] \xff", stdin=b"\n".join(lines) + b"\n"
    )
    assert outcome.code == 0
    assert outcome.out
    assert len(outcome.err.splitlines()) == len(lines)


def test_the_demo_goes_on_with_a_text() -> None:
    outcome = ggufmoe("chat", *QUICK, "-n", "4", stdin=b"In the beginning\n")
    assert outcome.code == 0 and outcome.out.strip()
    assert "The demo goes on with your text" in outcome.err


# Templates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n{{ x }", "chat template cannot be read (line 2: "),
        ("{{ raise_exception('no [/INST]\nhere') }}", "(line 1): no [/INST]\\nhere. `ggufmoe run` goes on"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
    ],
)
def test_a_template_that_cannot_be_used(plain: Path, tmp_path: Path, template: str, said: str) -> None:
    path = with_template(plain, tmp_path, template)
    assert_refused(in_process("chat", path, *QUICK, stdin=b"hello\n"), said)
    assert in_process("run", path, *QUICK, "-p", "hello", "-n", "1").code == 0


def test_a_conversation_longer_than_the_context_loses_its_oldest_turns(plain: Path, tmp_path: Path) -> None:
    path = with_template(plain, tmp_path, STRICT)
    stdin = b"".join(b"message number %d\n" % n for n in range(12))
    outcome = in_process(
        "chat", path, *QUICK, "-n", "8", "--context", "256", "--system", "be brief", stdin=stdin
    )
    assert outcome.code == 0, outcome
    lines = outcome.err.splitlines()
    assert sum(line.startswith("[") for line in lines) == 12
    assert any("were left out" in line for line in lines)


def test_a_message_longer_than_the_context_is_refused(chatml: Path) -> None:
    outcome = in_process("chat", chatml, *QUICK, "-n", "1", "--context", "40", stdin=b"ok\n" + b"x" * 99)
    assert outcome.code == 2
    assert "the context holds 40." in outcome.err.splitlines()[-1]


def test_bos_of_template_and_tokenizer(plain: Path, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_bos_token": (True, KV.BOOL), "tokenizer.chat_template": "{{ bos_token }}ab"}
    path = rewrite(plain, tmp_path / "m.gguf", keys=keys)
    outcome = in_process("chat", path, *QUICK, "-n", "1", stdin=b"x\n")
    assert outcome.err.startswith("[3 prompt tokens")


# A terminal ----------------------------------------------------------------------------------------------


class Terminal:
    """The command with a terminal as its input and output, as a person has it."""

    def __init__(self, *args: str | Path) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *args], stdin=slave, stdout=slave, stderr=slave, env={**ENVIRONMENT, "TERM": "dumb"}
        )
        os.close(slave)
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: bytes, timeout_s: float = 20) -> None:
        """Read until ``text`` has come, and forget everything up to it."""
        end = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            assert self.process.poll() is None, self.shown
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 4096)
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(chatml: Path, tmp_path: Path) -> Iterator[Terminal]:
    model = endless(chatml, tmp_path / "endless.gguf")
    terminal = Terminal("chat", model, *QUICK, "-n", "-1", "--context", "100000")
    try:
        yield terminal
    finally:
        terminal.close()


def test_ctrl_c_ends_an_answer_and_not_the_conversation(terminal: Terminal) -> None:
    terminal.wait_for(b">>> ")
    terminal.type("hello\n")
    terminal.wait_for(b"hello\r\n")
    time.sleep(0.2)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(b"(stopped)")
    terminal.wait_for(b">>> ")
    terminal.type("x" * 1000 + "\n")
    terminal.wait_for(b"x\r\n")
    time.sleep(0.2)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(b">>> ")
    terminal.process.send_signal(signal.SIGINT)  # at the prompt it ends the conversation
    assert terminal.process.wait(timeout=10) == 0
    assert b"Traceback" not in terminal.shown


def test_ctrl_d_ends_the_conversation(terminal: Terminal) -> None:
    terminal.wait_for(b">>> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=10) == 0


def test_a_message_that_is_too_long_does_not_end_a_persons_conversation(chatml: Path) -> None:
    terminal = Terminal("chat", chatml, *QUICK, "-n", "1", "--context", "40")
    try:
        terminal.wait_for(b">>> ")
        terminal.type("x" * 99 + "\n")
        terminal.wait_for(b"the context holds 40.")
        terminal.wait_for(b">>> ")
        terminal.type("ok\n")
        terminal.wait_for(b"prompt tokens")
        terminal.wait_for(b">>> ")
    finally:
        terminal.close()
