"""Evaluate tokens with experts that are read from the disk on demand, some of them in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from harness import PLAN, Logits, decode_greedily

from ggufmoe.gguf.model import Model, open_model
from ggufmoe.moe.ram import RamPlan
from ggufmoe.moe.sizes import every_token_tensors
from ggufmoe.native.devices import Backend, find_device
from ggufmoe.native.disk import DiskExecutor
from ggufmoe.native.interposer import interposer
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from ggufmoe.native.residents import Residents
from ggufmoe.run.disk import DiskTier


def ram_for(model: Model, n_slots: int) -> RamPlan:
    """A plan with room for ``n_slots`` experts of every layer, whatever else takes."""
    slot_bytes = sum(bank.slot_bytes * min(n_slots, bank.n_expert) for bank in model.banks)
    return RamPlan(0, every_token_tensors(model), model.banks, 0, 0, 0, slot_bytes)


def on_demand(
    path: Path,
    n_slots: int,
    evaluate: Callable[[LlamaContext], Logits] = decode_greedily,
    *,
    plan: ContextPlan | None = None,
    watch: Callable[[DiskTier], None] = lambda _tier: None,
) -> tuple[Logits, DiskExecutor, DiskTier]:
    """As ``harness.stock``. ``watch`` is called before the first and after the last token."""
    model, plan = open_model(path), plan or replace(PLAN, n_threads=1)
    with ExitStack() as stack:
        cpu = Backend(find_device("cpu"), n_threads=plan.n_threads)
        stack.callback(cpu.close)
        tier = DiskTier(model, ram_for(model, n_slots))
        stack.callback(tier.close)
        with tier.loading():
            llama = LlamaModel(path, LoadPlan(), offset=model.stock_offset)
        stack.callback(llama.close)
        stack.callback(tier.close)
        residents = {(bank.layer, bank.name): Residents(bank.n_expert) for bank in model.banks}
        executor = DiskExecutor(cpu, residents, tier.by_key)
        stack.callback(executor.close)
        with interposer().attach(executor):
            context = LlamaContext(llama, plan)
        stack.callback(context.close)
        tier.start(executor.weights)
        watch(tier)
        logits = evaluate(context)
        watch(tier)
        return logits, executor, tier
