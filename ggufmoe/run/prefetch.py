"""Prefetch: a thread asks the routers of the next layers early, and their experts are uploaded before their turn."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ..gguf.experts import BankKey, TensorInfo
from ..gguf.model import Model
from ..moe.prefetch import Floats, PrefetchCounts, PrefetchTrial, Router, predict
from ..moe.sizes import model_sizes

if TYPE_CHECKING:
    from .residency import Mover

log = logging.getLogger(__name__)

# What the norm before the experts is called, by how common it is.
NORM_NAMES = ("ffn_norm", "post_attention_norm", "ffn_norm_exps", "pre_ffw_norm_2")


class Prefetcher:
    """``depth`` layers ahead. With ``trial`` it is on only where it pays. Its counts are of decoded tokens."""

    def __init__(
        self, model: Model, movers: Mapping[BankKey, Mover], depth: int, trial: PrefetchTrial | None
    ) -> None:
        self.counts = PrefetchCounts()
        self.trial = trial
        self._movers = movers
        self._routers = read_routers(model)
        self._layers = sorted(layer for layer, name in movers if name == "exps" and layer in self._routers)
        self._next = {layer: self._layers[i + 1 : i + 1 + depth] for i, layer in enumerate(self._layers)}
        self._named: dict[int, set[int]] = {}  # of this token, by layer
        self._asked: dict[int, set[int]] = {}  # those of them whose upload was started
        self._token = 0
        self._ready: deque[tuple[int, int, list[int]]] = deque()  # token, layer, experts
        self._inputs: SimpleQueue[tuple[int, int, Floats] | None] = SimpleQueue()  # token, layer, x
        self._thread = threading.Thread(target=self._run, name="ggufmoe-prefetch", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        return len(self._layers) > 1 and (self.trial is None or self.trial.is_on)

    def arrive(self, layer: int, x: Floats) -> None:
        """The experts of ``layer`` are about to be computed for one token with the input ``x``."""
        if layer == self._layers[0]:
            self._token += 1
            self._named.clear()
            self._asked.clear()
        while self._ready:
            token, later, experts = self._ready.popleft()
            if token != self._token or later <= layer:
                self.counts.too_late += len(experts)
                continue
            self.counts.named += len(experts)
            self._named[later] = set(experts)
            self._asked[later] = set(self._movers[later, "exps"].foresee(experts))
        if self.is_on and self._next.get(layer):
            self._inputs.put((self._token, layer, x))

    def chosen(self, layer: int, experts: list[int], is_resident: list[bool]) -> None:
        """What the router of ``layer`` has chosen, and which of it a slot answered."""
        named = self._named.pop(layer, None)
        if named is None:
            return
        asked = self._asked.pop(layer, set())
        self.counts.used += len(named.intersection(experts))
        self.counts.late += sum(
            expert in asked and not there for expert, there in zip(experts, is_resident, strict=True)
        )
        self.counts.wasted += len(asked.difference(experts))

    def close(self) -> None:
        self._inputs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._newest()) is not None:
            token, layer, x = job
            here = self._routers[layer]
            for later in self._next[layer]:
                self._ready.append((token, later, predict(x, here, self._routers[later])))

    def _newest(self) -> tuple[int, int, Floats] | None:
        """The newest input: when this thread is late, older ones are of no use any more."""
        job = self._inputs.get()
        while job is not None:
            try:
                job = self._inputs.get_nowait()
            except Empty:
                return job
        return None


def read_routers(model: Model) -> dict[int, Router]:
    """The routers of all layers whose tensors are there, dequantised."""
    routers = {}
    for layer in model_sizes(model).layers:
        weight = model.by_name.get(f"blk.{layer.layer}.ffn_gate_inp.weight")
        if weight is None or not 0 < layer.n_used <= layer.n_expert:
            continue
        norms = (model.by_name.get(f"blk.{layer.layer}.{name}.weight") for name in NORM_NAMES)
        norm = next((tensor for tensor in norms if tensor is not None), None)
        bias = model.by_name.get(f"blk.{layer.layer}.exp_probs_b.bias")
        routers[layer.layer] = Router(
            weight=_read(model, weight),
            norm=_read(model, norm).ravel() if norm else None,
            selection_bias=_read(model, bias).ravel() if bias else None,
            n_used=layer.n_used,
        )
    return routers


def _read(model: Model, tensor: TensorInfo) -> Floats:
    """A whole tensor as float32, rows first."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    data = np.fromfile(model.paths[tensor.shard], np.uint8, tensor.n_bytes, offset=tensor.offset)
    rows = data.reshape(*reversed(tensor.ne[1:]), -1)
    values: Floats = dequantize(rows, GGMLQuantizationType[tensor.type_name.upper()]).astype(np.float32)
    return values
