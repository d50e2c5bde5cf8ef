"""What fits into ``--ram``: dense weights, context and working memory, and experts with what is left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import MemoryPlanError
from ..gguf.experts import ExpertBank, TensorInfo
from ..gguf.model import Model
from .kv import context_memory
from .sizes import every_token_tensors, is_draft_layer

PAGE_BYTES = 4096
# The interpreter, its libraries, llama.cpp's code, and what it keeps of a vocabulary; measured.
PROCESS_BYTES = 160 << 20


@dataclass(frozen=True)
class RamPlan:
    """How a budget of RAM is divided. ``slot_bytes`` are what is left for experts, of all ``banks`` together.

    ``dense`` are the tensors that every token reads. The experts' ``edge_bytes`` are pages that belong to two
    experts: they stay, once read.
    """

    ram_bytes: int
    dense: tuple[TensorInfo, ...]
    banks: tuple[ExpertBank, ...]
    edge_bytes: int
    context_bytes: int
    work_bytes: int
    slot_bytes: int

    @property
    def dense_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.dense)

    @property
    def slots_per_layer(self) -> float:
        """Experts per bank on average."""
        each = sum(bank.slot_bytes for bank in self.banks)
        return self.slot_bytes / each if each else 0.0


def plan_ram(model: Model, ram_bytes: int, n_ctx: int, n_ubatch: int) -> RamPlan | None:
    """Divide ``ram_bytes``.

    Returns: None if everything fits, so that nothing needs to be read on demand.
    Raises: MemoryPlanError if not even the experts of one token fit; it names the least that works.
    """
    banks = tuple(bank for bank in model.banks if not is_draft_layer(model, bank.layer))
    dense = every_token_tensors(model)
    memory = context_memory(model, n_ctx, n_ubatch=n_ubatch)
    context_bytes = memory.n_bytes if memory else 0
    work_bytes = PROCESS_BYTES + _batch_bytes(model, banks, n_ubatch)
    edge_bytes = sum((bank.n_expert + 1) * PAGE_BYTES * len(bank.weights) for bank in banks)
    fixed = sum(tensor.n_bytes for tensor in dense) + edge_bytes + context_bytes + work_bytes
    slot_bytes = ram_bytes - fixed
    if model.n_bytes + context_bytes + work_bytes <= ram_bytes:
        return None
    n_used = max(model.per_layer("expert_used_count", 0), default=0) or 1
    # those of the running step, too, while victims are given back
    least = sum(bank.slot_bytes * min(n_used, bank.n_expert) for bank in banks)
    if slot_bytes < least:
        raise MemoryPlanError(
            f"The dense weights, the context of {n_ctx} tokens, working memory and {n_used} experts per layer need "
            f"{fixed + least:,} bytes of RAM, the budget is {ram_bytes:,} ({least - slot_bytes:,} too few).",
            hint=f"Use --ram {-(-(fixed + least) // 2**20)}MiB or more, or lower --context.",
        )
    return RamPlan(ram_bytes, dense, banks, edge_bytes, context_bytes, work_bytes, slot_bytes)


def _batch_bytes(model: Model, banks: Iterable[ExpertBank], n_ubatch: int) -> int:
    """Working memory of a batch: what the widest layers write for each token, and the logits of one token."""
    n_embd = model.get("embedding_length", 0)
    n_used = max(model.per_layer("expert_used_count", 0), default=0) or 1
    attention = (
        4
        * max(model.per_layer("attention.head_count", 0), default=0)
        * (model.get("attention.key_length", 0) or 128)
    )
    experts = max(
        (sum(tensor.ne[1] for tensor in bank.weights.values()) + tensor_width(bank) for bank in banks),
        default=0,
    )
    per_token = 8 * n_embd + attention + 2 * n_used * experts
    return 4 * n_ubatch * per_token


def tensor_width(bank: ExpertBank) -> int:
    return max(tensor.ne[0] for tensor in bank.weights.values())
