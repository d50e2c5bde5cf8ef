"""Routing from a trace instead of the router: for benchmarks, so that random weights see real routing."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ..errors import UsageError
from ..gguf.model import Model
from ..moe.trace import read_trace


class RoutingTape:
    """The decoded tokens of a trace, fitted to a model: what a session computes with it is meaningless as text.

    Layers of the model take those of the trace in order, again from the first if there are more; experts beyond
    the model's are folded into its number, and a token's experts stay distinct.
    """

    def __init__(self, path: Path, model: Model) -> None:
        """Raises: UsageError if the file cannot be read or holds no decoded token; FormatError if it is no trace."""
        try:
            with path.open(encoding="utf-8") as file:
                trace = read_trace(file, path.name)
                steps: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
                for step in trace.steps:
                    if not step.is_prefill and len(step.tokens) == 1:
                        steps[step.step][step.layer] = step.tokens[0]
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
        self._steps = [steps[number] for number in sorted(steps)]
        if not self._steps:
            raise UsageError(f"{path}: the trace holds no decoded tokens")
        layers = sorted(self._steps[0])
        moe_layers = sorted({bank.layer for bank in model.banks})
        self._layer = {layer: layers[i % len(layers)] for i, layer in enumerate(moe_layers)}
        self._n_expert = {bank.layer: bank.n_expert for bank in model.banks if bank.name == "exps"}
        self.step = -1

    def __len__(self) -> int:
        """Decoded tokens that the trace holds; after the last one it begins again."""
        return len(self._steps)

    def chosen(self, layer: int, k: int) -> list[int]:
        """The ``k`` distinct experts of this step in a layer of the model."""
        n_expert = self._n_expert[layer]
        traced = self._steps[self.step % len(self._steps)].get(self._layer[layer], ())
        experts: dict[int, None] = {}
        for expert in traced[:k]:
            expert %= n_expert
            while expert in experts:
                expert = (expert + 1) % n_expert
            experts[expert] = None
        extra = 0
        while len(experts) < k:
            experts.setdefault(extra)
            extra += 1
        return list(experts)
