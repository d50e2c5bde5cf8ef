"""What a model consists of and what one token reads: dense weights, experts, and what scheduling can gain."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..gguf.experts import OLD_EXPERT_NAME, TensorInfo
from ..gguf.model import Model

_BLOCK = re.compile(r"blk\.(\d+)\.")
# Tables of which a token reads its own row only. Source: the ``ggml_get_rows`` of src/models/*.cpp.
_LOOKED_UP = frozenset(
    ("token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight")
)
# Encoders of pictures and sound, as Ollama's files hold them; text does not pass through them.
_ENCODER = re.compile(r"(?:v|a|mm|s)\.")


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of parameters (elements of tensors), and the bytes that hold them."""

    n_params: int = 0
    n_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.n_params + other.n_params, self.n_bytes + other.n_bytes)

    def part(self, numerator: int, denominator: int) -> Amount:
        denominator = max(denominator, 1)  # a file may claim a dimension of 0
        return Amount(self.n_params * numerator // denominator, self.n_bytes * numerator // denominator)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The experts of one MoE layer.

    ``experts`` is all of them: every projection, bias and scale, the smaller ``chexps`` of GroveMoE included;
    ``active`` is what one token uses. ``types`` are those of the matrices, largest part first.
    ``is_draft``: a layer of a multi-token-prediction head, which a usual context never runs.
    """

    layer: int
    n_expert: int
    n_used: int
    types: str
    experts: Amount
    active: Amount
    is_draft: bool

    @property
    def expert_bytes(self) -> int:
        """One expert with its share of everything that it shares: ``n_expert`` times this is the layer."""
        return self.experts.part(1, self.n_expert).n_bytes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """``dense`` is everything that is no routed expert, and ``shared`` the part of it in shared experts.

    ``active_dense`` and ``active_shared`` are what one token reads of them: not the rows of other tokens in
    the embedding (unless it is the output matrix too), no draft head, no encoder of pictures or sound.
    """

    dense: Amount
    shared: Amount
    active_dense: Amount
    active_shared: Amount
    n_layer: int
    n_shared: int
    layers: tuple[LayerSizes, ...]

    @property
    def experts(self) -> Amount:
        return sum((layer.experts for layer in self.layers), Amount())

    @property
    def active_experts(self) -> Amount:
        return sum((layer.active for layer in self.layers), Amount())

    @property
    def total(self) -> Amount:
        return self.dense + self.experts

    @property
    def active(self) -> Amount:
        return self.active_dense + self.active_experts

    @property
    def n_moe_layer(self) -> int:
        return len(self.layers)

    @property
    def n_dense_layer(self) -> int:
        return self.n_layer - len(self.layers)

    @property
    def largest_expert_bytes(self) -> int:
        return max((layer.expert_bytes for layer in self.layers), default=0)

    def slow_bytes(self, fast_bytes: int, context_bytes: int = 0) -> int:
        """Bytes of each token that come from slow memory when ``fast_bytes`` of fast memory are filled well.

        The context is placed first, then dense weights (each token reads them), then as many experts as fit.
        Every expert counts as equally likely, so this is what a cache does at least as well as.
        """
        left = max(fast_bytes - context_bytes, 0)
        placed = min(left, self.dense.n_bytes)
        dense = _rest(self.active_dense.n_bytes, placed, self.dense.n_bytes)
        return dense + _rest(self.active_experts.n_bytes, left - placed, self.experts.n_bytes)


def _rest(active: int, placed: int, total: int) -> int:
    """The part of ``active`` that stays slow when ``placed`` of ``total`` bytes are in fast memory."""
    return active * max(total - placed, 0) // total if total else 0


def model_sizes(model: Model) -> ModelSizes:
    """Read from the tensor table alone; Mixtral's old layout (one tensor per expert) counts as experts too.

    Raises: FormatError if the expert tensors of a layer contradict each other.
    """
    dense = [tensor for tensor in model.dense_tensors if OLD_EXPERT_NAME.fullmatch(tensor.name) is None]
    shared = [tensor for tensor in dense if "_shexp" in tensor.name]
    stated = model.get("expert_shared_count", 0)
    first_draft = _first_draft_layer(model)
    tied = "output.weight" not in model.by_name
    blocks = {layer for tensor in model.tensors if (layer := _layer(tensor)) is not None}
    n_used = dict(enumerate(model.per_layer("expert_used_count", 0)))
    read = {tensor.name: _read_per_token(tensor, tied, first_draft) for tensor in dense}
    return ModelSizes(
        dense=_amount(dense),
        shared=_amount(shared),
        active_dense=sum(read.values(), Amount()),
        active_shared=sum((read[tensor.name] for tensor in shared), Amount()),
        n_layer=len(blocks),
        n_shared=max(stated, 1) if shared else 0,
        layers=tuple(
            _layer_sizes(layer, groups, n_used.get(layer, 0), _is_draft(layer, first_draft))
            for layer, groups in sorted(_expert_layers(model).items())
        ),
    )


def every_token_tensors(model: Model) -> tuple[TensorInfo, ...]:
    """What every token reads as a whole: dense weights but for tables it looks up, and experts' biases and scales."""
    first_draft = _first_draft_layer(model)
    tied = "output.weight" not in model.by_name
    extras = [tensor for bank in model.banks for tensor in bank.extras]
    return tuple(
        tensor
        for tensor in (*model.dense_tensors, *extras)
        if _read_per_token(tensor, tied, first_draft).n_bytes == tensor.n_bytes
    )


def is_draft_layer(model: Model, layer: int) -> bool:
    """Whether the layer is a head for multi-token prediction, which a usual context never runs."""
    return _is_draft(layer, _first_draft_layer(model))


def schedule_order(sizes: Sequence[ModelSizes], fast_bytes: int, context_bytes: Sequence[int]) -> list[int]:
    """Indices of ``sizes``, the model that schedules best first.

    Slow memory sets the speed, so fewest bytes per token from it come first (``slow_bytes``); on a tie the
    model that reads less per token, then the one with the smaller experts, which are cheaper to move.
    """
    return sorted(
        range(len(sizes)),
        key=lambda n: (
            sizes[n].slow_bytes(fast_bytes, context_bytes[n]),
            sizes[n].active.n_bytes,
            sizes[n].largest_expert_bytes,
        ),
    )


def _amount(tensors: Iterable[TensorInfo]) -> Amount:
    return sum((Amount(math.prod(tensor.ne), tensor.n_bytes) for tensor in tensors), Amount())


def _layer(tensor: TensorInfo) -> int | None:
    match = _BLOCK.match(tensor.name)
    return int(match[1]) if match else None


def _first_draft_layer(model: Model) -> int | None:
    """The last layers may be heads for multi-token prediction (``nextn_predict_layers``)."""
    n_layer, n_draft = model.get("block_count", 0), model.get("nextn_predict_layers", 0)
    return n_layer - n_draft if 0 < n_draft < n_layer else None


def _is_draft(layer: int | None, first_draft: int | None) -> bool:
    return layer is not None and first_draft is not None and layer >= first_draft


def _read_per_token(tensor: TensorInfo, tied: bool, first_draft: int | None) -> Amount:
    if _ENCODER.match(tensor.name) or _is_draft(_layer(tensor), first_draft):
        return Amount()
    whole = _amount((tensor,))
    if tensor.name in _LOOKED_UP and not (tied and tensor.name == "token_embd.weight"):
        return whole.part(1, tensor.ne[1] if len(tensor.ne) > 1 else 1)
    return whole


@dataclass(frozen=True, slots=True)
class _Group:
    """Experts that one choice of the router indexes."""

    n_expert: int
    tensors: tuple[TensorInfo, ...]


def _expert_layers(model: Model) -> dict[int, list[_Group]]:
    """The experts of each MoE layer; those that the router chooses among come first."""
    layers: dict[int, list[_Group]] = defaultdict(list)
    for bank in sorted(model.banks, key=lambda bank: bank.name != "exps"):
        layers[bank.layer].append(_Group(bank.n_expert, bank.tensors))
    old: dict[int, list[tuple[str, TensorInfo]]] = defaultdict(list)
    for tensor in model.tensors:
        match = OLD_EXPERT_NAME.fullmatch(tensor.name)
        if match:
            old[int(match["layer"])].append((match["expert"], tensor))
    for layer, members in old.items():
        layers[layer].append(_Group(len({e for e, _ in members}), tuple(tensor for _, tensor in members)))
    return layers


def _layer_sizes(layer: int, groups: list[_Group], n_used: int, is_draft: bool) -> LayerSizes:
    active = Amount()
    for group in groups:
        active += _amount(group.tensors).part(max(0, min(n_used, group.n_expert)), group.n_expert)
    tensors = [tensor for group in groups for tensor in group.tensors]
    return LayerSizes(
        layer=layer,
        n_expert=groups[0].n_expert,
        n_used=max(0, min(n_used, groups[0].n_expert)),
        types=_types(tensors),
        experts=_amount(tensors),
        active=Amount() if is_draft else active,
        is_draft=is_draft,
    )


def _types(tensors: Iterable[TensorInfo]) -> str:
    """The types of the matrices, as in ``q4_K/q6_K``: the one with most bytes first."""
    n_bytes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.name.endswith(".weight"):
            n_bytes[tensor.type_name] += tensor.n_bytes
    return "/".join(sorted(n_bytes, key=lambda name: (-n_bytes[name], name)))
