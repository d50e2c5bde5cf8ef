"""Evaluate tokens with stock llama.cpp, and with experts placed by hand on backends made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ggufmoe.gguf.experts import ExpertBank, expert_span
from ggufmoe.gguf.model import open_model
from ggufmoe.native.devices import Backend, find_device
from ggufmoe.native.executor import Executor
from ggufmoe.native.interposer import interposer
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan
from ggufmoe.native.mapped import MappedFile
from ggufmoe.native.residents import Residents
from ggufmoe.native.slots import Slots
from ggufmoe.run.residency import stack_shapes

Logits = NDArray[np.float32]
# bank -> the device index of every resident expert
Choice = Callable[[ExpertBank], dict[int, int]]
N_PROMPT, N_DECODE = 33, 8
PLAN = ContextPlan(n_ctx=256, n_threads=2)


def prompt_for(n_vocab: int, n_tokens: int = N_PROMPT) -> list[int]:
    return [int(token) for token in np.random.default_rng(3).integers(0, n_vocab, n_tokens)]


def decode_greedily(context: LlamaContext, n_prompt: int = N_PROMPT, n_decode: int = N_DECODE) -> Logits:
    """Logits after every token of a prompt and of a greedy answer ``(n_prompt + n_decode, n_vocab)``."""
    prompt = prompt_for(context.model.n_vocab, n_prompt)
    context.decode(prompt, 0, all_logits=True)
    rows = [context.logits(row).copy() for row in range(n_prompt)]
    for step in range(n_decode):
        context.decode([int(rows[-1].argmax())], n_prompt + step)
        rows.append(context.logits().copy())
    return np.stack(rows)


def stock(
    path: Path,
    evaluate: Callable[[LlamaContext], Logits] = decode_greedily,
    *,
    plan: ContextPlan = PLAN,
    load: LoadPlan | None = None,
) -> Logits:
    with ExitStack() as stack:
        llama = LlamaModel(path, load or LoadPlan())
        stack.callback(llama.close)
        context = LlamaContext(llama, plan)
        stack.callback(context.close)
        return evaluate(context)


def placed(
    path: Path,
    choose: Choice,
    evaluate: Callable[[LlamaContext], Logits] = decode_greedily,
    *,
    n_devices: int = 1,
    plan: ContextPlan = PLAN,
    load: LoadPlan | None = None,
    prepare: Callable[[Executor], None] = lambda _executor: None,
) -> tuple[Logits, Executor]:
    """As ``stock``, with the experts that ``choose`` names on ``n_devices`` CPU backends of their own."""
    model = open_model(path)
    cpu = find_device("cpu")
    with ExitStack() as stack:
        backends = [Backend(cpu, n_threads=plan.n_threads) for _ in range(n_devices + 1)]
        for backend in backends:
            stack.callback(backend.close)
        file = MappedFile(path)
        banks = {}
        for bank in model.banks:
            residents = banks[bank.layer, bank.name] = Residents(bank.n_expert)
            choice = choose(bank)
            for device in range(n_devices):
                experts = [expert for expert, place in choice.items() if place == device]
                if experts:
                    slots = residents.slots[device] = Slots(
                        backends[device + 1], stack_shapes(bank), len(experts)
                    )
                    stack.callback(slots.close)
                for slot, expert in enumerate(experts):
                    residents.put(
                        expert,
                        device,
                        slot,
                        {
                            projection: file.address(tensor.offset + expert_span(tensor, expert).start)
                            for projection, tensor in bank.weights.items()
                        },
                    )
        file.close()
        llama = LlamaModel(path, load or LoadPlan())
        stack.callback(llama.close)
        executor = Executor(backends[0], backends[1:], banks)
        stack.callback(executor.close)
        prepare(executor)
        with interposer().attach(executor):
            context = LlamaContext(llama, plan)
        stack.callback(context.close)
        return evaluate(context), executor


def none(_bank: ExpertBank) -> dict[int, int]:
    return {}


def half(bank: ExpertBank) -> dict[int, int]:
    return dict.fromkeys(range(0, bank.n_expert, 2), 0)


def everything(bank: ExpertBank) -> dict[int, int]:
    return dict.fromkeys(range(bank.n_expert), 0)


def some(bank: ExpertBank) -> dict[int, int]:
    """A random third, another one in every layer."""
    chosen = np.random.default_rng(bank.layer).permutation(bank.n_expert)
    return {int(expert): 0 for expert in chosen[: max(1, bank.n_expert // 3)]}


def spread(bank: ExpertBank) -> dict[int, int]:
    """Two thirds of the experts, on two devices in turn."""
    return {expert: expert % 3 for expert in range(bank.n_expert) if expert % 3 < 2}


CHOICES: Sequence[Choice] = (none, half, everything, some)
