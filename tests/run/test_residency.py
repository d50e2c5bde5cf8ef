"""The residency engine: experts move while the model answers, and no bit of the answer changes."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import write_tiny_model

from ggufmoe import Session, SessionOptions, parse_residents
from ggufmoe.models import demo_model_path
from ggufmoe.moe.policies import POLICIES
from ggufmoe.moe.prefetch import Router, predict
from ggufmoe.moe.replay import replay_recorded
from ggufmoe.moe.throttle import MAX_CREDIT_S, PROBE_SHARE
from ggufmoe.moe.trace import read_trace
from ggufmoe.native.batch import WAYS
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from ggufmoe.run.prefetch import read_routers

OPTIONS = SessionOptions(
    context=512, threads=2, cold_store="mmap", residents=parse_residents("25%"), upload_share=1.0
)


def drive(session: Session, tokens: list[int], prompt: int = 1) -> np.ndarray:
    """Logits after the last tokens of ``tokens``, the first ``prompt`` of which come as one batch."""
    session.executor.decoding = False
    rows = [session.evaluate(tokens[:prompt]).copy()]
    session.executor.decoding = True
    rows += [session.evaluate([token]).copy() for token in tokens[prompt:]]
    return np.stack(rows)


def stock_logits(path: Path, tokens: list[int], prompt: int = 1) -> np.ndarray:
    llama = LlamaModel(path, LoadPlan())
    context = LlamaContext(llama, ContextPlan(n_ctx=512, n_threads=2))
    context.decode(tokens[:prompt], 0)
    rows = [context.logits().copy()]
    for position, token in enumerate(tokens[prompt:], prompt):
        context.decode([token], position)
        rows.append(context.logits().copy())
    context.close()
    llama.close()
    return np.stack(rows)


def random_tokens(n_vocab: int, n: int) -> list[int]:
    """Random tokens are routed all over the experts: the worst that can happen to a cache."""
    return [int(token) for token in np.random.default_rng(7).integers(0, n_vocab, n)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_is_exact_and_moves_experts(policy: str) -> None:
    tokens = random_tokens(6144, 150)
    with Session(demo_model_path(), replace(OPTIONS, policy=policy)) as session:
        np.testing.assert_array_equal(drive(session, tokens, 40), stock_logits(demo_model_path(), tokens, 40))
        moved = session.engine.uploads.n_uploaded if session.engine.uploads else 0
        assert (moved > 20) == (policy != "static")


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "grovemoe", "qwen3next", "deepseek2"])
def test_stress_tiny_slots_slow_uploads_many_steps(arch: str, tmp_path: Path) -> None:
    """Thousands of steps (layers x tokens) in which uploads complete at any moment, or late, or in bursts."""
    path = write_tiny_model(tmp_path / "model.gguf", arch)
    tokens = random_tokens(128, 450)
    dice = random.Random(1)
    slow = replace(
        OPTIONS,
        residents=parse_residents("2"),
        before_upload=lambda _expert: time.sleep(dice.choice((0, 0, 0.0001, 0.002))),
    )
    with Session(path, slow) as session:
        ours = drive(session, tokens, 30)
        assert session.engine.uploads is not None
        assert session.engine.uploads.n_uploaded > 50
        for key, mover in session.engine.movers.items():
            residents = session.executor.banks[key]
            places = [place for place in residents.places if place >= 0]
            assert len(places) == len(set(places)) <= 2, "two experts in one slot"
            assert list(residents.place_array) == residents.places
            assert len(mover.policy.residents) + len(mover.policy.pending) <= 2
    np.testing.assert_array_equal(ours, stock_logits(path, tokens, 30))


def test_a_dying_upload_thread_is_reported_and_the_session_goes_on_exactly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    uploads = []

    def fail_at_the_tenth(expert: int) -> None:
        uploads.append(expert)
        if len(uploads) >= 10:
            raise OSError("the link is gone")

    tokens = random_tokens(6144, 120)
    options = replace(OPTIONS, before_upload=fail_at_the_tenth)
    with caplog.at_level(logging.WARNING), Session(demo_model_path(), options) as session:
        ours = drive(session, tokens)
        assert session.engine.uploads is not None
        assert isinstance(session.engine.uploads.error, OSError)
        assert session.engine.uploads.n_uploaded == 9
        assert len(uploads) == 10, "it goes on trying"
        assert session.engine.uploads.wait()
        for mover in session.engine.movers.values():
            mover.arrive()
            assert not mover.policy.pending, "slots wait for ever for uploads that never come"
    assert "the link is gone" in caplog.text
    np.testing.assert_array_equal(ours, stock_logits(demo_model_path(), tokens))


def test_an_expert_is_resident_only_when_its_upload_is_complete() -> None:
    """While the upload is held up, its expert stays cold; steps do not wait for it."""
    held: list[int] = []

    def hold(expert: int) -> None:
        held.append(expert)
        time.sleep(0.3)

    options = replace(OPTIONS, before_upload=hold)
    with Session(demo_model_path(), options) as session:
        before = {key: list(r.places) for key, r in session.executor.banks.items()}
        started = time.perf_counter()
        for token in random_tokens(6144, 10):
            session.evaluate([token])
        assert time.perf_counter() - started < 0.28 or len(held) > 1
        for key, residents in session.executor.banks.items():
            shown = {e for e, place in enumerate(residents.places) if place >= 0}
            at_start = {e for e, place in enumerate(before[key]) if place >= 0}
            if len(held) <= 1:
                assert shown <= at_start
        assert held


def test_recency_beats_standing_still() -> None:
    rates = {}
    for policy in ("static", "lru", "lfru"):
        with Session(demo_model_path(), replace(OPTIONS, policy=policy)) as session:
            text = session.tokenize("And the LORD said unto Moses, Go unto the children of Israel, and say")
            drive(session, text * 6, len(text))
            rates[policy] = session.hit_rate or 0.0
    assert rates["lru"] > rates["static"] + 0.1
    assert rates["lfru"] > rates["static"] + 0.1


def test_uploads_that_save_nothing_are_few() -> None:
    """Where cold pairs cost next to nothing, uploads get the probe's share of the time, and what was saved up."""
    upload_s = 0.01
    options = replace(OPTIONS, upload_share=None, before_upload=lambda _expert: time.sleep(upload_s))
    with Session(demo_model_path(), options) as session:
        uploads = session.engine.uploads
        assert uploads is not None
        uploads.throttle.computed_cold = lambda _seconds, _n_pairs: None  # type: ignore[method-assign, assignment]
        session.executor.decoding = True
        begun = time.perf_counter()
        for token in random_tokens(6144, 250):
            started = time.perf_counter()
            session.evaluate([token])
            session.engine.stepped(time.perf_counter() - started, session.executor.traffic.decode_hits)
        allowed_s = MAX_CREDIT_S + PROBE_SHARE * (time.perf_counter() - begun)
        assert 0 < uploads.n_uploaded <= allowed_s / upload_s + 2


def test_closing_with_uploads_under_way() -> None:
    for _ in range(5):
        options = replace(OPTIONS, before_upload=lambda _expert: time.sleep(0.01))
        with Session(demo_model_path(), options) as session:
            drive(session, random_tokens(6144, 20))


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "grovemoe", "llama4", "gemma4"])
def test_every_way_to_compute_a_prompt_is_exact(arch: str, way: str | None, tmp_path: Path) -> None:
    """On the CPU, with the residents, through staging slots; longer and shorter than a batch."""
    path = write_tiny_model(tmp_path / "model.gguf", arch)
    tokens = random_tokens(128, 330)
    with Session(path, replace(OPTIONS, prefill=way, n_ubatch=128)) as session:
        session.executor.decoding = False
        ours = [session.evaluate(tokens[:300]).copy(), session.evaluate(tokens[300:302]).copy()]
        assert (session.executor.batches.staging_bytes > 0) == (way == "stream") or way is None
    llama = LlamaModel(path, LoadPlan())
    context = LlamaContext(llama, ContextPlan(n_ctx=512, n_threads=2, n_ubatch=128))
    context.decode(tokens[:300], 0)
    stock = [context.logits().copy()]
    context.decode(tokens[300:302], 300)
    stock.append(context.logits().copy())
    context.close()
    llama.close()
    np.testing.assert_array_equal(np.stack(ours), np.stack(stock))


@pytest.fixture
def answer() -> Callable[[SessionOptions], str]:
    def text(options: SessionOptions) -> str:
        from ggufmoe import Sampling

        with Session(demo_model_path(), options) as session:
            return "".join(session.generate("In the beginning", Sampling(temperature=0), max_tokens=60))

    return text


def test_answers_do_not_depend_on_who_is_resident(answer: Callable[[SessionOptions], str]) -> None:
    answers = {
        answer(replace(OPTIONS, residents=parse_residents(residents), policy=policy))
        for residents in ("0", "1", "8", "50%", "all")
        for policy in ("lfru", "static")
    }
    assert len(answers) == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "gemma4"])
def test_the_recorded_routing_replays_to_the_last_hit(arch: str, policy: str, tmp_path: Path) -> None:
    """The engine's self-check: its policies, given the same uploads at the same steps, hit as often."""
    path = write_tiny_model(tmp_path / "model.gguf", arch)
    dice = random.Random(2)
    options = replace(
        OPTIONS,
        policy=policy,
        residents=parse_residents("3"),
        trace=tmp_path / "run.trace",
        before_upload=lambda _expert: time.sleep(dice.choice((0, 0.0005))),
    )
    with Session(path, options) as session:
        drive(session, random_tokens(128, 200), 30)
        traffic = session.executor.traffic
        moved = session.engine.uploads.n_uploaded if session.engine.uploads else 0
        assert not (tmp_path / "run.trace").exists(), "a half file under the final name"
    with (tmp_path / "run.trace").open(encoding="utf-8") as file:
        trace = read_trace(file, "run.trace")
        run = replay_recorded(trace.header, trace.steps)
    assert run.differs_at is None
    assert run.replayed_hits == run.recorded_hits == traffic.decode_hits + traffic.prefill_hits
    assert run.routings == traffic.decode + traffic.prefill
    assert (moved > 0) == (policy != "static")


@pytest.mark.parametrize("arch", ["deepseek", "qwen3moe", "deepseek2", "gemma4", "gpt-oss"])
def test_prefetch_changes_nothing_but_who_is_resident(arch: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", arch, n_layer=5)
    tokens = random_tokens(128, 120)
    options = replace(OPTIONS, residents=parse_residents("4"), prefetch_depth=3)
    with Session(path, options) as session:
        np.testing.assert_array_equal(drive(session, tokens, 10), stock_logits(path, tokens, 10))
        prefetcher = session.engine.prefetcher
        assert prefetcher is not None
        if arch == "gpt-oss":  # its experts come as single matrices: nothing to foresee from
            assert prefetcher.counts.named == 0
        else:
            counts = prefetcher.counts
            assert counts.named + counts.too_late > 200
            assert counts.used <= counts.named and counts.late <= counts.used


class Oracle:
    """Asks the routers in the middle of a step, so that no prediction is late."""

    def __init__(self, routers: dict[int, Router]) -> None:
        self.routers = routers
        self.named: dict[tuple[int, int], list[int]] = {}
        self.right: dict[int, list[float]] = {0: [], 1: [], 2: []}
        self.chosen_now: list[int] = []

    def arrive(self, layer: int, x: NDArray[np.float32]) -> None:
        here = self.routers[layer]
        self.score(0, predict(x, here, here), self.chosen_now)
        for ahead in (1, 2):
            if layer + ahead in self.routers:
                self.named[layer + ahead, ahead] = predict(x, here, self.routers[layer + ahead])

    def chosen(self, layer: int, experts: list[int], is_resident: list[bool]) -> None:
        self.chosen_now = experts
        for ahead in (1, 2):
            if (layer, ahead) in self.named:
                self.score(ahead, self.named.pop((layer, ahead)), experts)

    def score(self, ahead: int, named: list[int], chosen: list[int]) -> None:
        self.right[ahead].append(len(set(named) & set(chosen)) / len(chosen))


def test_the_next_routers_name_most_of_what_is_chosen() -> None:
    """A layer's own router names all of it, which is the control; chance would be 6 of 64."""
    with Session(demo_model_path(), OPTIONS) as session:
        oracle = session.executor.foreseer = Oracle(read_routers(session.model))
        text = session.tokenize(
            "And the LORD said unto Moses, Go unto the children of Israel, and say unto them"
        )
        drive(session, text * 5, len(text))
    right = {ahead: float(np.mean(shares)) for ahead, shares in oracle.right.items()}
    assert right[0] == 1.0
    assert right[1] > 0.65
    assert right[2] > 0.5


def test_auto_prefetch_ends_its_trial() -> None:
    with Session(demo_model_path(), replace(OPTIONS, prefetch_depth=None)) as session:
        from ggufmoe import Sampling

        list(session.generate("In the beginning", Sampling(temperature=0), max_tokens=140))
        assert session.engine.prefetcher is not None
        trial = session.engine.prefetcher.trial
        assert trial is not None and trial.verdict is not None
        assert session.engine.prefetcher.is_on is trial.verdict


def test_routing_from_a_trace_is_what_is_decoded(tmp_path: Path) -> None:
    """Recorded, then played to another seed of the model: the same experts, whatever its router would say."""
    first = write_tiny_model(tmp_path / "first.gguf", "qwen3moe")
    other = write_tiny_model(tmp_path / "other.gguf", "qwen3moe", seed=9)
    tokens = random_tokens(128, 40)
    with Session(first, replace(OPTIONS, trace=tmp_path / "first.trace")) as session:
        drive(session, tokens)
    options = replace(OPTIONS, routing_from=tmp_path / "first.trace", trace=tmp_path / "played.trace")
    with Session(other, options) as session:
        drive(session, tokens)
    routed = []
    for name in ("first.trace", "played.trace"):
        with (tmp_path / name).open(encoding="utf-8") as file:
            trace = read_trace(file, name)
            routed.append([(s.layer, s.tokens) for s in trace.steps if not s.is_prefill])
    assert routed[0] == routed[1]
