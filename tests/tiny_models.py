"""Tiny random MoE models that stock llama.cpp loads, and the means to damage or rearrange a GGUF file.

Everything is derived from the seed and the tensor's name: a file is the same bytes every time, and a tensor
holds the same weights whatever ``quant`` and ``n_layer`` are.
Sources: llama.cpp 0c1e57098, ``src/models/*.cpp`` (shapes), ``src/llama-arch.cpp`` (names).
"""

from __future__ import annotations

import itertools
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

KV = gguf.GGUFValueType

N_EMBD = 128
N_HEAD = 2
N_HEAD_KV = 1
HEAD_DIM = 64
N_FF = 192
N_FF_EXP = 64
N_CTX_TRAIN = 1024
N_TEST_VOCAB = 128

_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "BF16": 32,
    "MXFP4": 38,
}


def write_tiny_model(
    path: Path,
    arch: str,
    *,
    n_layer: int | None = None,
    n_expert: int = 8,
    n_expert_used: int = 3,
    quant: str = "Q8_0",
    seed: int = 1,
    text: bool = False,
) -> Path:
    """Write a model of one of ``ARCHITECTURES`` (or "llama-dense") and return ``path``.

    ``quant`` is the type of the routed experts' matrices; other matrices are Q8_0, routers and vectors F32.
    ``text`` gives a byte-level BPE vocabulary that tokenises any UTF-8; otherwise there are 128 nameless
    tokens and no usable tokenizer. ``n_layer`` is 2 by default, 4 for llama4.
    """
    least = _LEAST_LAYERS.get(arch, 1)
    n_layer = n_layer or max(2, least)
    if n_layer < least:
        raise ValueError(f"{arch} needs at least {least} blocks, not {n_layer}")
    tokenizer = _text_tokenizer() if text else _test_tokenizer()
    n_vocab = len(tokenizer["tokenizer.ggml.tokens"])
    model = _Draft(n_layer, n_expert, n_expert_used, n_vocab, gguf.GGMLQuantizationType[quant], seed)
    model.matrix("token_embd", N_EMBD, n_vocab, std=1.0)
    model.vector("output_norm.weight", N_EMBD, around=1.0)
    model.matrix("output", N_EMBD, n_vocab, gain=1.5)
    _WRITERS[arch](model)

    architecture = _ARCHITECTURE_OF.get(arch, arch)
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "general.name": f"tiny {arch}",
        "general.file_type": _FILE_TYPES[quant],
        "general.quantization_version": 2,
        **{f"{architecture}.{name}": value for name, value in model.keys.items()},
        f"{architecture}.vocab_size": n_vocab,
        **tokenizer,
    }
    for name, value in values.items():
        content, kind, element = _typed(value)
        writer.add_key_value(name, content, kind, sub_type=element)
    for name, (data, tensor_type) in model.tensors.items():
        writer.add_tensor(name, data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass
class _Draft:
    """The keys (without their architecture prefix) and tensors of a model being put together."""

    n_layer: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    quant: gguf.GGMLQuantizationType
    seed: int
    keys: dict[str, Any] = field(init=False)
    tensors: dict[str, tuple[NDArray[Any], gguf.GGMLQuantizationType]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = {
            "context_length": N_CTX_TRAIN,
            "embedding_length": N_EMBD,
            "block_count": self.n_layer,
            "feed_forward_length": N_FF,
            "attention.head_count": N_HEAD,
            "attention.head_count_kv": N_HEAD_KV,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": HEAD_DIM,
            "rope.freq_base": 10000.0,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "expert_feed_forward_length": N_FF_EXP,
        }

    def _random(self, name: str, shape: Sequence[int]) -> NDArray[np.float32]:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())]).standard_normal(
            shape, np.float32
        )

    def matrix(
        self,
        name: str,
        n_in: int,
        n_out: int,
        *stack: int,
        gain: float = 1.0,
        std: float | None = None,
        quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    ) -> None:
        """A weight of ``ne = (n_in, n_out, *stack)``; input of variance 1 gives output of std ``gain``."""
        weights = self._random(name, (*reversed(stack), n_out, n_in))
        weights *= np.float32(gain / n_in**0.5 if std is None else std)
        self.tensors[f"{name}.weight"] = (gguf.quants.quantize(weights, quant), quant)

    def vector(self, name: str, *ne: int, around: float = 0.0, spread: float = 0.1) -> None:
        """An F32 tensor; ``name`` ends in its kind (``.weight``, ``.bias``, ``.scale``)."""
        values = np.float32(around) + np.float32(spread) * self._random(name, tuple(reversed(ne)))
        self.tensors[name] = (values, gguf.GGMLQuantizationType.F32)

    def attention(
        self, layer: int, *, n_kv: int = HEAD_DIM, qk_norm: bool = False, gated: bool = False
    ) -> None:
        """Plain attention. ``gated``: the query projection also yields a gate per head (qwen3next)."""
        block = f"blk.{layer}"
        n_q = N_HEAD * HEAD_DIM
        self.vector(f"{block}.attn_norm.weight", N_EMBD, around=1.0)
        self.matrix(f"{block}.attn_q", N_EMBD, n_q * (2 if gated else 1))
        self.matrix(f"{block}.attn_k", N_EMBD, n_kv)
        self.matrix(f"{block}.attn_v", N_EMBD, n_kv)
        self.matrix(f"{block}.attn_output", n_q, N_EMBD)
        if qk_norm:
            self.vector(f"{block}.attn_q_norm.weight", HEAD_DIM, around=1.0)
            self.vector(f"{block}.attn_k_norm.weight", HEAD_DIM, around=1.0)

    def feed_forward(self, layer: int, suffix: str = "", n_ff: int = N_FF) -> None:
        """A dense feed-forward: every token uses it. ``suffix`` is "_shexp" for a shared expert."""
        block = f"blk.{layer}"
        self.matrix(f"{block}.ffn_gate{suffix}", N_EMBD, n_ff)
        self.matrix(f"{block}.ffn_up{suffix}", N_EMBD, n_ff)
        self.matrix(f"{block}.ffn_down{suffix}", n_ff, N_EMBD)

    def experts(self, layer: int, *, merged: bool = False) -> None:
        """Router and routed experts. ``merged``: gate and up in one tensor, the gate's rows first."""
        block = f"blk.{layer}"
        self.matrix(
            f"{block}.ffn_gate_inp", N_EMBD, self.n_expert, gain=1.5, quant=gguf.GGMLQuantizationType.F32
        )
        if merged:
            self.expert_stack(f"{block}.ffn_gate_up_exps", N_EMBD, 2 * N_FF_EXP)
        else:
            self.expert_stack(f"{block}.ffn_gate_exps", N_EMBD, N_FF_EXP)
            self.expert_stack(f"{block}.ffn_up_exps", N_EMBD, N_FF_EXP)
        # routing weights add up to 1 at most and SwiGLU shrinks, so the gain makes the experts' share count
        self.expert_stack(f"{block}.ffn_down_exps", N_FF_EXP, N_EMBD, gain=3.0)

    def expert_stack(
        self, name: str, n_in: int, n_out: int, n_expert: int | None = None, *, gain: float = 1.0
    ) -> None:
        self.matrix(name, n_in, n_out, n_expert or self.n_expert, gain=gain, quant=self.quant)


def _qwen3moe(model: _Draft) -> None:
    for layer in range(model.n_layer):
        model.attention(layer, qk_norm=True)
        model.vector(f"blk.{layer}.ffn_norm.weight", N_EMBD, around=1.0)
        model.experts(layer)


def _qwen3moe_scaled(model: _Draft) -> None:
    _qwen3moe(model)
    for layer, projection in itertools.product(range(model.n_layer), ("gate", "up", "down")):
        name = f"blk.{layer}.ffn_{projection}_exps"
        model.vector(f"{name}.scale", model.n_expert, around=1.0, spread=0.25)
        model.vector(f"{name}.input_scale", model.n_expert, around=1.0)


def _deepseek(model: _Draft) -> None:
    n_shared = 2
    model.keys |= {
        "leading_dense_block_count": 1,
        "expert_shared_count": n_shared,
        "expert_weights_scale": 1.0,
        "attention.head_count_kv": N_HEAD,
    }
    for layer in range(model.n_layer):
        model.attention(layer, n_kv=N_EMBD)
        model.vector(f"blk.{layer}.ffn_norm.weight", N_EMBD, around=1.0)
        if layer < 1:
            model.feed_forward(layer)
        else:
            model.experts(layer)
            model.feed_forward(layer, "_shexp", n_shared * N_FF_EXP)


def _deepseek2(model: _Draft) -> None:
    q_rank, kv_rank, rope_dim, nope_dim, value_dim = 64, 64, 32, 32, 32
    model.keys |= {
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,  # sigmoid
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": q_rank,
        "attention.kv_lora_rank": kv_rank,
        "attention.key_length": kv_rank + rope_dim,
        "attention.value_length": kv_rank,
        "attention.key_length_mla": nope_dim + rope_dim,
        "attention.value_length_mla": value_dim,
        "rope.dimension_count": rope_dim,
    }
    for layer in range(model.n_layer):
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", N_EMBD, around=1.0)
        model.matrix(f"{block}.attn_q_a", N_EMBD, q_rank)
        model.vector(f"{block}.attn_q_a_norm.weight", q_rank, around=1.0)
        model.matrix(f"{block}.attn_q_b", q_rank, N_HEAD * (nope_dim + rope_dim))
        model.matrix(f"{block}.attn_kv_a_mqa", N_EMBD, kv_rank + rope_dim)
        model.vector(f"{block}.attn_kv_a_norm.weight", kv_rank, around=1.0)
        model.matrix(f"{block}.attn_k_b", nope_dim, kv_rank, N_HEAD)
        model.matrix(f"{block}.attn_v_b", kv_rank, value_dim, N_HEAD)
        model.matrix(f"{block}.attn_output", N_HEAD * value_dim, N_EMBD)
        model.vector(f"{block}.ffn_norm.weight", N_EMBD, around=1.0)
        if layer < 1:
            model.feed_forward(layer)
        else:
            model.experts(layer)
            model.vector(f"{block}.exp_probs_b.bias", model.n_expert)
            model.feed_forward(layer, "_shexp", N_FF_EXP)


def _gpt_oss(model: _Draft) -> None:
    model.keys |= {
        "attention.sliding_window": 16
    }  # even layers; shorter than the tests' prompts, so it matters
    for layer in range(model.n_layer):
        block = f"blk.{layer}"
        model.attention(layer)
        for projection, n_out in (
            ("q", N_HEAD * HEAD_DIM),
            ("k", HEAD_DIM),
            ("v", HEAD_DIM),
            ("output", N_EMBD),
        ):
            model.vector(f"{block}.attn_{projection}.bias", n_out)
        model.vector(f"{block}.attn_sinks.weight", N_HEAD, spread=1.0)
        model.vector(f"{block}.post_attention_norm.weight", N_EMBD, around=1.0)
        model.experts(layer)
        model.vector(f"{block}.ffn_gate_inp.bias", model.n_expert)
        for projection, n_out in (("gate", N_FF_EXP), ("up", N_FF_EXP), ("down", N_EMBD)):
            model.vector(f"{block}.ffn_{projection}_exps.bias", n_out, model.n_expert, spread=0.3)


def _llama(model: _Draft) -> None:
    model.keys["feed_forward_length"] = N_FF_EXP
    del model.keys["expert_feed_forward_length"]
    for layer in range(model.n_layer):
        model.attention(layer)
        model.vector(f"blk.{layer}.ffn_norm.weight", N_EMBD, around=1.0)
        model.experts(layer)


def _llama_dense(model: _Draft) -> None:
    for name in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
        del model.keys[name]
    for layer in range(model.n_layer):
        model.attention(layer)
        model.vector(f"blk.{layer}.ffn_norm.weight", N_EMBD, around=1.0)
        model.feed_forward(layer)


def _olmoe(model: _Draft) -> None:
    model.keys |= {"feed_forward_length": N_FF_EXP, "attention.head_count_kv": N_HEAD}
    del model.keys["expert_feed_forward_length"]
    for layer in range(model.n_layer):
        block = f"blk.{layer}"
        model.attention(layer, n_kv=N_EMBD)
        model.vector(f"{block}.attn_q_norm.weight", N_EMBD, around=1.0)
        model.vector(f"{block}.attn_k_norm.weight", N_EMBD, around=1.0)
        model.vector(f"{block}.ffn_norm.weight", N_EMBD, around=1.0)
        model.experts(layer)


def _granitemoe(model: _Draft) -> None:
    _llama(model)
    model.keys |= {
        "logit_scale": 0.8,  # a divisor
        "residual_scale": 0.7,
        "embedding_scale": 1.5,
        "attention.scale": 0.1,
        "expert_shared_feed_forward_length": N_FF_EXP,
    }
    for layer in range(model.n_layer):
        model.feed_forward(layer, "_shexp", N_FF_EXP)


def _grovemoe(model: _Draft) -> None:
    experts_per_group, n_ff_chunk = 2, 32
    _qwen3moe(model)
    model.keys |= {
        "expert_chunk_feed_forward_length": n_ff_chunk,
        "expert_group_scale": 0.5,
        "experts_per_group": experts_per_group,
    }
    n_chunk = model.n_expert // experts_per_group
    for layer in range(model.n_layer):
        block = f"blk.{layer}"
        model.expert_stack(f"{block}.ffn_gate_chexps", N_EMBD, n_ff_chunk, n_chunk)
        model.expert_stack(f"{block}.ffn_up_chexps", N_EMBD, n_ff_chunk, n_chunk)
        model.expert_stack(f"{block}.ffn_down_chexps", n_ff_chunk, N_EMBD, n_chunk, gain=3.0)


def _llama4(model: _Draft) -> None:
    step = 2
    model.keys["interleave_moe_layer_step"] = step
    for layer in range(model.n_layer):
        model.attention(layer)
        model.vector(f"blk.{layer}.ffn_norm.weight", N_EMBD, around=1.0)
        if (layer + 1) % step:
            model.feed_forward(layer)
        else:
            model.experts(layer)
            model.feed_forward(layer, "_shexp", N_FF_EXP)


def _gemma4(model: _Draft) -> None:
    windowed = [layer % 2 == 0 for layer in range(model.n_layer)]
    model.keys |= {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": windowed,
        "attention.key_length_swa": HEAD_DIM,
        "attention.value_length_swa": HEAD_DIM,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    # llama.cpp multiplies the embeddings by sqrt(n_embd)
    model.matrix("token_embd", N_EMBD, model.n_vocab, std=N_EMBD**-0.5)
    model.vector("rope_freqs.weight", HEAD_DIM // 2, around=1.0, spread=0.0)
    for layer in range(model.n_layer):
        block = f"blk.{layer}"
        model.attention(layer, qk_norm=True)
        for norm in ("post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.vector(f"{block}.{norm}.weight", N_EMBD, around=1.0)
        for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            model.vector(f"{block}.{norm}.weight", N_EMBD, around=1.0)
        model.feed_forward(layer)
        model.experts(layer, merged=True)
        # the router's input is divided by sqrt(n_embd); the scale takes that back
        model.vector(f"{block}.ffn_gate_inp.scale", N_EMBD, around=N_EMBD**0.5)
        model.vector(f"{block}.ffn_down_exps.scale", model.n_expert, around=1.0, spread=0.25)


def _qwen3next(model: _Draft) -> None:
    interval, state_dim, n_k_heads, n_v_heads, n_conv = 2, 32, 2, 4, 4
    key_dim, value_dim = state_dim * n_k_heads, state_dim * n_v_heads
    model.keys |= {
        "full_attention_interval": interval,
        "expert_shared_feed_forward_length": N_FF_EXP,
        "ssm.conv_kernel": n_conv,
        "ssm.inner_size": value_dim,
        "ssm.state_size": state_dim,
        "ssm.time_step_rank": n_v_heads,
        "ssm.group_count": n_k_heads,
    }
    for layer in range(model.n_layer):
        block = f"blk.{layer}"
        if (layer + 1) % interval == 0:
            model.attention(layer, qk_norm=True, gated=True)
        else:
            model.vector(f"{block}.attn_norm.weight", N_EMBD, around=1.0)
            model.matrix(f"{block}.attn_qkv", N_EMBD, 2 * key_dim + value_dim)
            model.matrix(f"{block}.attn_gate", N_EMBD, value_dim)
            model.matrix(f"{block}.ssm_ba", N_EMBD, 2 * n_v_heads)
            model.vector(f"{block}.ssm_conv1d.weight", n_conv, 2 * key_dim + value_dim, spread=0.5)
            model.vector(f"{block}.ssm_dt.bias", n_v_heads)
            model.vector(f"{block}.ssm_a", n_v_heads, around=-1.0)
            model.vector(f"{block}.ssm_norm.weight", state_dim, around=1.0)
            model.matrix(f"{block}.ssm_out", value_dim, N_EMBD)
        model.vector(f"{block}.post_attention_norm.weight", N_EMBD, around=1.0)
        model.experts(layer, merged=True)
        model.feed_forward(layer, "_shexp", N_FF_EXP)
        model.vector(f"{block}.ffn_gate_inp_shexp.weight", N_EMBD)


def _lfm2moe(model: _Draft) -> None:
    n_conv = 3
    recurrent = [layer % 2 == 0 for layer in range(model.n_layer)]
    model.keys |= {
        "attention.head_count_kv": [0 if conv else N_HEAD for conv in recurrent],
        "leading_dense_block_count": 0,
        "expert_gating_func": 2,  # sigmoid
        "shortconv.l_cache": n_conv,
    }
    model.tensors["token_embd_norm.weight"] = model.tensors.pop("output_norm.weight")
    for layer, conv in enumerate(recurrent):
        block = f"blk.{layer}"
        if conv:
            model.vector(f"{block}.attn_norm.weight", N_EMBD, around=1.0)
            model.vector(f"{block}.shortconv.conv.weight", n_conv, N_EMBD, spread=0.5)
            model.matrix(f"{block}.shortconv.in_proj", N_EMBD, 3 * N_EMBD)
            model.matrix(f"{block}.shortconv.out_proj", N_EMBD, N_EMBD)
        else:
            model.attention(layer, n_kv=N_HEAD * HEAD_DIM, qk_norm=True)
        model.vector(f"{block}.ffn_norm.weight", N_EMBD, around=1.0)
        model.experts(layer)
        model.vector(f"{block}.exp_probs_b.bias", model.n_expert)


_WRITERS: dict[str, Callable[[_Draft], None]] = {
    "qwen3moe": _qwen3moe,
    "qwen3moe-scaled": _qwen3moe_scaled,
    "deepseek": _deepseek,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "llama": _llama,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "grovemoe": _grovemoe,
    "llama4": _llama4,
    "gemma4": _gemma4,
    "qwen3next": _qwen3next,
    "lfm2moe": _lfm2moe,
    "llama-dense": _llama_dense,
}
# With fewer blocks deepseek has no experts, and llama.cpp aborts on the others: gemma4 and the hybrids want
# both kinds of block; llama4 always sets an input (attention temperature) that only every fourth block uses.
_LEAST_LAYERS = {"deepseek": 2, "deepseek2": 2, "gemma4": 2, "qwen3next": 2, "lfm2moe": 2, "llama4": 4}
_ARCHITECTURE_OF = {"qwen3moe-scaled": "qwen3moe", "llama-dense": "llama"}

ARCHITECTURES: tuple[str, ...] = tuple(name for name in _WRITERS if name != "llama-dense")
"""All MoE models; "llama-dense" is the one that has no experts."""


def _test_tokenizer() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": [f"tok_{token}" for token in range(N_TEST_VOCAB)],
        "tokenizer.ggml.token_type": [1] * N_TEST_VOCAB,
        "tokenizer.ggml.add_bos_token": False,
    }


def _text_tokenizer() -> dict[str, Any]:
    """One token per byte, the prefixes of a few words, and ChatML's control tokens at the end."""
    letters = _byte_letters()
    words = ("hello", " hello", " the", " expert", " world", "ing", "你好", "🙂")
    merges: dict[str, str] = {}  # by the token that a merge makes
    for word in words:
        first, *rest = (letters[byte] for byte in word.encode())
        for prefix, letter in zip(itertools.accumulate([first, *rest]), rest, strict=False):
            merges.setdefault(prefix + letter, f"{prefix} {letter}")
    plain = [*letters, *merges]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": plain + control,
        "tokenizer.ggml.token_type": [1] * len(plain) + [3] * len(control),
        "tokenizer.ggml.merges": list(merges.values()),
        "tokenizer.ggml.bos_token_id": len(plain),
        "tokenizer.ggml.eos_token_id": len(plain),
        "tokenizer.ggml.eot_token_id": len(plain) + 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_letters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


# Reading, rearranging and damaging files. gguf-py's writer refuses empty arrays and wrong types, so bytes are
# put together here.

_SCALARS = {
    KV.UINT8: "B",
    KV.INT8: "b",
    KV.UINT16: "H",
    KV.INT16: "h",
    KV.UINT32: "I",
    KV.INT32: "i",
    KV.FLOAT32: "f",
    KV.BOOL: "?",
    KV.UINT64: "Q",
    KV.INT64: "q",
    KV.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in the file. ``ne[0]`` is contiguous; ``type`` need not be a known one."""

    name: str
    type: int
    ne: tuple[int, ...]
    data: bytes

    def patched(self, offset: int, new: bytes) -> RawTensor:
        """The same tensor with ``new`` written over its bytes at ``offset``."""
        return replace(self, data=self.data[:offset] + new + self.data[offset + len(new) :])


def read_raw(path: Path) -> tuple[dict[str, Any], list[RawTensor]]:
    """Keys as ``(value, type, element type)``, and tensors, both in the order of the file."""
    reader = gguf.GGUFReader(path)
    values = {}
    for name, item in reader.fields.items():
        if name.startswith("GGUF."):  # the reader's own names for the header
            continue
        # parts[3] is the element type; ``types`` lacks it where the array is empty
        element = KV(int(item.parts[3][0])) if item.types[0] == KV.ARRAY else None
        values[name] = (item.contents(), item.types[0], element)
    tensors = [
        RawTensor(t.name, int(t.tensor_type), tuple(int(n) for n in t.shape), t.data.tobytes())
        for t in reader.tensors
    ]
    return values, tensors


def write_raw(
    path: Path,
    values: Mapping[str, object],
    tensors: Sequence[RawTensor],
    *,
    alignment: int = 32,
    byte_order: str = "<",
) -> Path:
    """Write a GGUF file, empty arrays and nonsense included. Tensor data keeps its byte order."""
    records = [kv_record(name, value, byte_order=byte_order) for name, value in values.items()]
    offset = 0
    for tensor in tensors:
        records.append(tensor_record(tensor.name, tensor.ne, tensor.type, offset, byte_order=byte_order))
        offset += _padded(len(tensor.data), alignment)
    head = gguf_header(len(values), b"".join(records), n_tensors=len(tensors), byte_order=byte_order)
    with path.open("wb") as file:
        for data in (head, *(tensor.data for tensor in tensors)):
            file.write(data.ljust(_padded(len(data), alignment), b"\0"))
    return path


def rewrite(
    src: Path,
    dst: Path,
    *,
    keys: Mapping[str, object] | None = None,
    drop: Iterable[str] = (),
    tensors: Callable[[list[RawTensor]], list[RawTensor]] = list,
    alignment: int = 32,
    byte_order: str = "<",
) -> Path:
    """Copy ``src`` with keys set or dropped and its tensors passed through ``tensors``. Returns ``dst``.

    A key's value is a plain one (int becomes u32, or i32 where negative), or states its type:
    ``(32, KV.INT32)``, ``([], KV.ARRAY, KV.STRING)``. ``drop`` wins over ``keys``.
    """
    values, originals = read_raw(src)
    values |= keys or {}
    for name in drop:
        values.pop(name, None)
    return write_raw(dst, values, tensors(originals), alignment=alignment, byte_order=byte_order)


def split_shards(src: Path, folder: Path, max_tensors: int) -> list[Path]:
    """Write ``<stem>-00001-of-0000N.gguf`` and so on; all keys but ``split.*`` are in the first."""
    values, tensors = read_raw(src)
    groups = [tensors[start : start + max_tensors] for start in range(0, len(tensors), max_tensors)]
    shards = []
    for number, group in enumerate(groups):
        split = {
            "split.no": (number, KV.UINT16),
            "split.count": (len(groups), KV.UINT16),
            "split.tensors.count": (len(tensors), KV.INT32),
        }
        path = folder / f"{src.stem}-{number + 1:05}-of-{len(groups):05}.gguf"
        shards.append(write_raw(path, {**values, **split} if number == 0 else split, group))
    return shards


def to_per_expert_layout(src: Path, dst: Path) -> Path:
    """The layout of before April 2024, one matrix per expert: ``blk.0.ffn_gate.3.weight``. Drops scales."""

    def unstack(tensors: list[RawTensor]) -> list[RawTensor]:
        result = []
        for tensor in tensors:
            match = re.fullmatch(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.(\w+)", tensor.name)
            if match is None:
                result.append(tensor)
            elif match[2] == "weight":
                n_bytes = len(tensor.data) // tensor.ne[2]
                for expert in range(tensor.ne[2]):
                    data = tensor.data[expert * n_bytes : (expert + 1) * n_bytes]
                    result.append(RawTensor(f"{match[1]}.{expert}.weight", tensor.type, tensor.ne[:2], data))
        return result

    return rewrite(src, dst, tensors=unstack)


def gguf_header(
    n_kv: int, body: bytes = b"", *, n_tensors: int = 0, version: int = 3, byte_order: str = "<"
) -> bytes:
    """The start of a GGUF file, followed by ``body``: records made by hand, as many as claimed or not."""
    return b"GGUF" + struct.pack(f"{byte_order}IQQ", version, n_tensors, n_kv) + body


def kv_record(name: str, value: object, *, byte_order: str = "<") -> bytes:
    """One key with its value, which may state its type (see ``rewrite``)."""
    content, kind, element = _typed(value)
    return (
        _string(name, byte_order)
        + struct.pack(f"{byte_order}I", int(kind))
        + _packed(content, kind, element, byte_order)
    )


def kv_string(name: str, value: str) -> bytes:
    return kv_record(name, value)


def kv_u32(name: str, value: int) -> bytes:
    return kv_record(name, (value, KV.UINT32))


def kv_string_header(name: str, n_bytes: int) -> bytes:
    """A string that claims ``n_bytes`` and has none."""
    return _string(name) + struct.pack("<IQ", int(KV.STRING), n_bytes)


def kv_array_header(name: str, element: int, count: int) -> bytes:
    """An array that claims ``count`` elements and has none."""
    return _string(name) + struct.pack("<IIQ", int(KV.ARRAY), int(element), count)


def kv_array_of_strings_header(name: str, count: int) -> bytes:
    return kv_array_header(name, int(KV.STRING), count)


def tensor_record(
    name: str, ne: Sequence[int], type: int, offset: int, *, n_dims: int | None = None, byte_order: str = "<"
) -> bytes:
    """One entry of the tensor table. ``n_dims`` is what the entry claims; None means ``len(ne)``."""
    return (
        _string(name, byte_order)
        + struct.pack(f"{byte_order}I", len(ne) if n_dims is None else n_dims)
        + struct.pack(f"{byte_order}{len(ne)}QIQ", *ne, type, offset)
    )


def _typed(value: Any) -> tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """The value with its type and, for an array, the type of its elements."""
    if isinstance(value, tuple):
        content, kind, *element = value
        return content, kind, element[0] if element else None
    if isinstance(value, list):
        integers = isinstance(value[0], int) and not isinstance(value[0], bool)
        return value, KV.ARRAY, KV.INT32 if integers else _typed(value[0])[1]
    if isinstance(value, int) and not isinstance(value, bool):
        return value, KV.INT32 if value < 0 else KV.UINT32, None
    return value, KV.get_type(value), None


def _packed(value: Any, kind: Any, element: Any, byte_order: str) -> bytes:
    if kind == KV.STRING:
        return _string(value, byte_order)
    if kind == KV.ARRAY:
        items = b"".join(_packed(item, element, None, byte_order) for item in value)
        return struct.pack(f"{byte_order}IQ", int(element), len(value)) + items
    return struct.pack(f"{byte_order}{_SCALARS[kind]}", value)


def _string(text: str, byte_order: str = "<") -> bytes:
    data = text.encode()
    return struct.pack(f"{byte_order}Q", len(data)) + data


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
