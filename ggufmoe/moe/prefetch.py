"""Naming the experts of later layers early: what the next layers' routers say of this layer's input.

The input of an MoE layer is normalised and scaled by the layer's own norm weights. It changes little from layer to
layer, so taking out this layer's scale and putting in the next one's gives an input that the next router can be
asked about before the layer in between is computed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# A trial compares windows of decoded tokens with and without prefetch, in turns.
WINDOW_TOKENS = 16
N_WINDOWS = 8
# What prefetch must gain to stay on.
MIN_GAIN = 0.02


@dataclass(frozen=True)
class Router:
    """A layer's router ``(n_expert, n_embd)``, the weights of the norm before it ``(n_embd,)`` or None, and the
    bias that only the selection sees ``(n_expert,)`` or None (sigmoid routers, as DeepSeek-V3's)."""

    weight: Floats
    norm: Floats | None
    selection_bias: Floats | None
    n_used: int


def predict(x: Floats, here: Router, there: Router) -> list[int]:
    """The experts that ``there`` would choose for this layer's input ``x`` ``(n_embd,)``, likeliest first."""
    if here.norm is not None and there.norm is not None:
        scale = np.divide(there.norm, here.norm, out=np.ones_like(x), where=here.norm != 0)
        x = x * scale
    scores = there.weight @ x
    if there.selection_bias is not None:
        scores = 1 / (1 + np.exp(-scores)) + there.selection_bias
    best = np.argpartition(-scores, there.n_used - 1)[: there.n_used]
    return [int(expert) for expert in best[np.argsort(-scores[best])]]


@dataclass
class PrefetchCounts:
    """``named`` experts were predicted before their layer's turn, ``used`` of them chosen; ``late`` ones were used
    before their upload was complete, ``wasted`` ones were uploaded and not used in their step. ``too_late`` counts
    those that were predicted after their turn."""

    named: int = 0
    used: int = 0
    late: int = 0
    wasted: int = 0
    too_late: int = 0

    @property
    def accuracy(self) -> float | None:
        """Share of the experts named in time that were chosen."""
        return self.used / self.named if self.named else None


class PrefetchTrial:
    """Finds out whether prefetch pays: windows with and without it in turns, then the better of the two."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._n_tokens = 0
        self.verdict: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether the next token is to be decoded with prefetch."""
        if self.verdict is not None:
            return self.verdict
        return self._n_tokens // WINDOW_TOKENS % 2 == 1

    def stepped(self, seconds: float) -> None:
        """A token was decoded as ``is_on`` said. The first tokens of a window are still the other's."""
        if self.verdict is not None:
            return
        if self._n_tokens % WINDOW_TOKENS >= 2:
            self._seconds[self.is_on].append(seconds)
        self._n_tokens += 1
        if self._n_tokens == WINDOW_TOKENS * N_WINDOWS:
            on, off = (statistics.median(self._seconds[way]) for way in (True, False))
            self.verdict = on < off * (1 - MIN_GAIN)
