"""A session from loading to closing: answers, what is kept of the KV cache, failures, and interrupts."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

import ggufmoe
from ggufmoe import GgufMoeError, NativeError, Sampling, Session, SessionOptions, UsageError, parse_residents
from ggufmoe.gguf.model import open_model
from ggufmoe.models import demo_model_path
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from ggufmoe.run.setup import prepare

GREEDY = Sampling(temperature=0)
SMALL = SessionOptions(context=256, threads=2, cold_store="mmap", residents=parse_residents("25%"))
PROMPT = "In the beginning God created"


def stock_answer(prompt: str, n_tokens: int) -> str:
    """What stock llama.cpp goes on with, taking the likeliest token each time."""
    llama = LlamaModel(demo_model_path(), LoadPlan())
    context = LlamaContext(llama, ContextPlan(n_ctx=256, n_threads=2))
    tokens = llama.tokenize(prompt)
    context.decode(tokens, 0)
    pieces = []
    for position in range(len(tokens), len(tokens) + n_tokens):
        token = int(context.logits().argmax())
        pieces.append(llama.piece(token))
        context.decode([token], position)
    context.close()
    llama.close()
    return b"".join(pieces).decode()


def test_greedy_answer_is_stocks() -> None:
    with Session(demo_model_path(), SMALL) as session:
        answer = "".join(session.generate(PROMPT, GREEDY, max_tokens=40))
        assert answer == stock_answer(PROMPT, 40)
        assert session.hit_rate is not None
        assert 0.05 < session.hit_rate < 0.95
        (use,) = session.slot_use()
        assert use.n_resident == 6 * 16
        # an expert of the demo is 3 matrices of 256 x 64 in Q8_0
        assert use.slot_bytes == 6 * 16 * 3 * 256 * 64 * 34 // 32


def test_timings_count_what_was_measured() -> None:
    with Session(demo_model_path(), SMALL) as session:
        list(session.generate(PROMPT, GREEDY, max_tokens=10))
        timings = session.timings
        assert timings is not None
        assert (timings.prompt_tokens, timings.reused_tokens, timings.answer_tokens) == (5, 0, 10)
        assert timings.prefill_rate is not None and timings.decode_rate is not None
        list(session.generate(PROMPT, GREEDY, max_tokens=0))
        assert session.timings is not None
        assert session.timings.answer_tokens == 0
        assert session.timings.decode_rate is None


def test_same_seed_same_answer() -> None:
    answers = []
    for seed in (1, 1, 2):
        with Session(demo_model_path(), SMALL) as session:
            answers.append("".join(session.generate(PROMPT, Sampling(seed=seed), max_tokens=30)))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2", "gpt-oss", "lfm2moe", "qwen3next"])
def test_later_prompts_equal_a_fresh_session(arch: str, tmp_path: Path) -> None:
    """Kept prefixes, cut ones, and caches that cannot be cut (recurrent state, sliding windows)."""
    path = write_tiny_model(tmp_path / "model.gguf", arch, text=True)
    options = SessionOptions(context=256, threads=2, cold_store="mmap", residents=parse_residents("50%"))
    prompts = [
        "one two three",
        "one two three four five six seven eight nine",
        "one two four",
        "one two four",
    ]
    with Session(path, options) as session:
        kept = []
        for prompt in prompts:
            answer = list(session.generate(session.tokenize(prompt), GREEDY, max_tokens=8))
            assert session.timings is not None
            kept.append(session.timings.reused_tokens)
            with Session(path, options) as fresh:
                assert answer == list(fresh.generate(fresh.tokenize(prompt), GREEDY, max_tokens=8)), prompt
    if arch in ("qwen3moe", "deepseek2"):
        assert kept[1] > 0 and kept[2] > 0


def test_answers_stop_at_the_end_of_the_context() -> None:
    with Session(demo_model_path(), SessionOptions(context=16, threads=2)) as session:
        tokens = session.tokenize(PROMPT)
        list(session.generate(tokens, GREEDY, max_tokens=-1))
        assert len(session.tokens) == 16


def test_a_prompt_that_does_not_fit_names_both_numbers() -> None:
    with Session(demo_model_path(), SessionOptions(context=16, threads=2)) as session:
        tokens = session.tokenize("x " * 40)
        with pytest.raises(UsageError, match=rf"{len(tokens)} tokens.*holds 16"):
            session.generate(tokens)
        list(session.generate(tokens[:16], GREEDY, max_tokens=4))


def test_a_failing_callback_is_an_error_and_the_next_session_works() -> None:
    with Session(demo_model_path(), SMALL) as session:
        run = session.executor._run_token
        session.executor._run_token = _fail  # type: ignore[method-assign, assignment]
        with pytest.raises(NativeError, match="boom"):
            list(session.generate(PROMPT, GREEDY, max_tokens=5))
        session.executor._run_token = run  # type: ignore[method-assign]
        answer = "".join(session.generate(PROMPT, GREEDY, max_tokens=20))
    assert answer == stock_answer(PROMPT, 20)


def _fail(*_: object) -> int:
    raise ValueError("boom")


def test_an_expert_that_does_not_exist_is_an_error_not_a_crash() -> None:
    with Session(demo_model_path(), SMALL) as session:
        for residents in session.executor.banks.values():
            residents.places = residents.places[:3]
        with pytest.raises(NativeError, match="index out of range"):
            list(session.generate(PROMPT, GREEDY, max_tokens=5))


def test_interrupting_an_answer_keeps_the_session_true() -> None:
    """Ctrl-C in the middle of a decode: what the KV cache holds and what we believe of it agree afterwards."""
    with Session(demo_model_path(), SMALL) as session:
        timer = threading.Timer(0.15, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):
                list(session.generate(PROMPT, GREEDY, max_tokens=100))
        timer.join()
        assert len(session.tokens) == session.context.n_evaluated
        assert "".join(session.generate(PROMPT, GREEDY, max_tokens=20)) == stock_answer(PROMPT, 20)


def test_closing_twice_and_using_a_device_twice() -> None:
    session = Session(demo_model_path(), SMALL)
    session.close()
    session.close()
    for _ in range(3):
        with Session(demo_model_path(), SMALL) as again:
            again.evaluate([1, 2, 3])


def test_a_failed_load_frees_what_it_had(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "qwen3moe")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"attn_norm.weight", b"attn_nope.weight"))
    for _ in range(3):
        with pytest.raises(GgufMoeError, match="attn_norm"):
            Session(path, SMALL)


def test_budgets_divide_into_slots() -> None:
    model = open_model(demo_model_path())
    expert = model.banks[0].slot_bytes
    options = SessionOptions(devices=("cpu",), vram_bytes=expert * 6 * 10, context=256)
    assert prepare(model, options).placement.n_resident() == 6 * 10
    tight = SessionOptions(devices=("cpu",), vram_bytes=expert * 6 * 10 - 1, residents=parse_residents("10"))
    with pytest.raises(GgufMoeError, match="1 too few"):
        prepare(model, tight)


def test_evaluate_returns_logits_of_every_token() -> None:
    with Session(demo_model_path(), SMALL) as session:
        every = session.evaluate(list(range(5, 25)), all_logits=True)
        assert every.shape == (20, session.llama.n_vocab)
        session.reset()
        np.testing.assert_array_equal(session.evaluate(list(range(5, 25))), every[-1])


def test_the_public_api_is_typed_and_complete() -> None:
    assert set(ggufmoe.__all__) >= {"Session", "SessionOptions", "Sampling", "open_model", "verify"}
    for name in ggufmoe.__all__:
        assert getattr(ggufmoe, name) is not None
    assert (Path(ggufmoe.__file__).parent / "py.typed").exists()
