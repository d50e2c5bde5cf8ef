"""What tests of conversions share."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
from numpy.typing import NDArray
from tiny_models import RawTensor

from ggufmoe.gguf.model import open_model
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan


def profile_for(path: Path) -> dict[int, list[int]]:
    """A count for every expert, another order in every layer."""
    return {
        bank.layer: [int(n) for n in np.random.default_rng(bank.layer).permutation(bank.n_expert)]
        for bank in open_model(path).banks
        if bank.name == "exps"
    }


def logits(path: Path, plan: ContextPlan = harness.PLAN) -> NDArray[np.float32]:
    """Stock llama.cpp's logits, of a block file through its stock table."""
    llama = LlamaModel(path, LoadPlan(), offset=open_model(path).stock_offset)
    context = LlamaContext(llama, plan)
    try:
        return harness.decode_greedily(context)
    finally:
        context.close()
        llama.close()


def with_bad_block(
    name: str, expert: int, scale: int = 0x7E00
) -> Callable[[list[RawTensor]], list[RawTensor]]:
    """NaN for the scale of the first block of one expert."""

    def edit(tensors: list[RawTensor]) -> list[RawTensor]:
        return [
            t.patched(expert * (len(t.data) // t.ne[2]), struct.pack("<H", scale)) if t.name == name else t
            for t in tensors
        ]

    return edit
