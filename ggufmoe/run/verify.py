"""Is it still the same model? Logits against stock llama.cpp on the same file, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..gguf.model import Model
from ..native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from .session import Session
from .setup import SessionOptions, prepare

PASSAGE = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and "
    "darkness was upon the face of the deep.\n\ndef read(path):\n    with open(path, encoding='utf-8') as file:\n"
    "        return file.read()\n\n管理员可以通过命令行安装软件包。"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far our logits are from stock's, over ``n_prompt`` tokens of prefill and ``n_decode`` of decoding.

    ``kl_divergence`` is in nats, from stock's distribution to ours. ``first_difference`` is the position of the
    first token whose likeliest successor differs, or None. Positions where either side holds a value that is
    not finite count as ``n_not_finite``; where there are any, ``max_difference`` is infinite.
    """

    n_prompt: int
    n_decode: int
    max_difference: float
    mean_kl_divergence: float
    max_kl_divergence: float
    top1_agreement: float
    first_difference: int | None
    n_not_finite: int
    decode_hit_rate: float | None

    def within(self, tolerance: float) -> bool:
        """Whether the largest difference of a logit is at most ``tolerance``. NaN never is."""
        return self.n_not_finite == 0 and self.max_difference <= tolerance


def verify(model: Model, options: SessionOptions, *, n_prompt: int, n_decode: int, seed: int) -> Comparison:
    """Evaluate the same tokens with stock llama.cpp and with ours, the experts placed as ``options`` say.

    The tokens are a bundled passage, or random ids where the model has no tokenizer; the decoded ones are what
    stock finds likeliest, so that both sides always see the same text. Stock runs on the CPU, with the same
    kernels (repacked weights or not) as our cold experts.
    Raises: GgufMoeError as ``Session`` does.
    """
    setup = prepare(model, options)
    reference, prompt, decoded = _stock(model, setup.load.repack, setup.n_threads, n_prompt, n_decode, seed)
    with Session(model, options) as session:
        ours = [session.evaluate(prompt, all_logits=True)]
        session.executor.decoding = True
        for token in decoded:
            ours.append(session.evaluate([token]).copy()[None])
        hit_rate = session.hit_rate
    return compare(reference, np.concatenate(ours), len(prompt), hit_rate)


def _stock(
    model: Model, repack: bool, n_threads: int, n_prompt: int, n_decode: int, seed: int
) -> tuple[NDArray[np.float32], list[int], list[int]]:
    """Logits of stock llama.cpp ``(n_prompt + n_decode, n_vocab)``, the prompt, and what it decoded greedily."""
    llama = LlamaModel(model.paths[0], LoadPlan(repack=repack), offset=model.stock_offset)
    try:
        prompt = passage_tokens(llama, n_prompt, seed)
        plan = ContextPlan(
            n_ctx=len(prompt) + n_decode,
            n_threads=n_threads,
            n_batch=len(prompt),
            n_ubatch=min(512, len(prompt)),
        )
        context = LlamaContext(llama, plan)
        try:
            context.decode(prompt, 0, all_logits=True)
            rows = [context.logits(row).copy() for row in range(len(prompt))]
            decoded: list[int] = []
            for step in range(n_decode):
                decoded.append(int(np.nan_to_num(rows[-1], nan=-np.inf).argmax()))
                context.decode([decoded[-1]], len(prompt) + step)
                rows.append(context.logits().copy())
            return np.stack(rows), prompt, decoded
        finally:
            context.close()
    finally:
        llama.close()


def passage_tokens(llama: LlamaModel, n_tokens: int, seed: int) -> list[int]:
    """``n_tokens`` of the passage, repeated as often as needed; random ids for a model without a tokenizer."""
    if llama.has_tokenizer:
        tokens = llama.tokenize(PASSAGE)
        if tokens:
            return (tokens * (n_tokens // len(tokens) + 1))[:n_tokens]
    return [int(token) for token in np.random.default_rng(seed).integers(0, llama.n_vocab, n_tokens)]


def compare(
    reference: NDArray[np.float32], ours: NDArray[np.float32], n_prompt: int, hit_rate: float | None
) -> Comparison:
    """Compare two sets of logits ``(n_tokens, n_vocab)``; the first ``n_prompt`` rows are prefill."""
    finite = np.isfinite(reference).all(axis=1) & np.isfinite(ours).all(axis=1)
    n_not_finite = int((~finite).sum())
    a, b = reference[finite].astype(np.float64), ours[finite].astype(np.float64)
    p, q = _log_softmax(a), _log_softmax(b)
    divergence = (np.exp(p) * (p - q)).sum(axis=1) if len(a) else np.array([np.inf])
    same = a.argmax(axis=1) == b.argmax(axis=1)
    positions = np.flatnonzero(finite)[~same]
    return Comparison(
        n_prompt=n_prompt,
        n_decode=len(reference) - n_prompt,
        max_difference=float("inf") if n_not_finite else float(np.abs(a - b).max(initial=0.0)),
        mean_kl_divergence=float(max(divergence.mean(), 0.0)),
        max_kl_divergence=float(max(divergence.max(), 0.0)),
        top1_agreement=float(same.mean()) if len(same) else 0.0,
        first_difference=int(positions[0]) if positions.size else None,
        n_not_finite=n_not_finite,
        decode_hit_rate=hit_rate,
    )


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
