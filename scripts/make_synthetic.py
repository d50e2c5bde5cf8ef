"""Write a Mixture-of-Experts model of a real shape with random weights, at about the speed of the disk.

Such a file has the layers, tensor names, types and sizes of the real model, so memory plans, transfers and
speed are those of the real model. Its text is noise. Nothing is downloaded: the vocabulary is made here.

A pool of random quantised blocks is made once for each type and scale. Every tensor, and every expert of an
expert tensor, is then written from the pool starting at a block of its own, so no two of them are alike.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize

POOL_BYTES = 4 << 20  # small enough that a model's five or six pools stay far below 64 MiB
HEADER_BYTES = 64 << 20  # generous: a vocabulary of 200,000 tokens takes some 4 MB
ALIGNMENT = 32  # bytes; the GGUF default

END_OF_TEXT = "<|endoftext|>"
N_VOCAB_MIN = (
    258  # END_OF_TEXT, 256 bytes, and the one merge without which llama.cpp rejects a BPE vocabulary
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one model. Names follow llama.cpp's hyperparameters."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    rope_freq_base: float
    n_layer_dense: int = 0
    n_expert_shared: int = 0
    n_swa: int = 0
    expert_type: GGMLType | None = None  # None: the type of all other weights

    @property
    def residual_gain(self) -> float:
        """Scale of the weights that add to the residual stream, as in GPT-2's initialisation.

        At full scale, what attention mixes from all tokens would soon outweigh the token's own embedding, and
        deep layers would send every token to the same few experts.
        """
        return 1 / math.sqrt(2 * self.n_layer)

    def shrunk(self, divisor: int) -> Shape:
        """The same model, narrower: widths and head counts divided, experts and head size kept.

        Widths are rounded up to a multiple of 32, the block length of most quantised types.
        """

        def width(n: int) -> int:
            return -(-n // divisor // 32) * 32

        return replace(
            self,
            n_embd=width(self.n_embd),
            n_ff=width(self.n_ff),
            n_ff_exp=width(self.n_ff_exp),
            n_head=max(1, self.n_head // divisor),
            n_head_kv=max(1, self.n_head_kv // divisor),
        )


# Sizes as in the config.json that each model was published with.
SHAPES = {
    "deepseek-moe-16b": Shape(
        arch="deepseek",
        n_layer=28,
        n_embd=2048,
        n_head=16,
        n_head_kv=16,
        head_dim=128,
        n_expert=64,
        n_expert_used=6,
        n_ff_exp=1408,
        n_ff=10944,
        n_vocab=102_400,
        n_ctx=4096,
        rope_freq_base=1e4,
        n_layer_dense=1,
        n_expert_shared=2,
    ),
    "qwen3-30b-a3b": Shape(
        arch="qwen3moe",
        n_layer=48,
        n_embd=2048,
        n_head=32,
        n_head_kv=4,
        head_dim=128,
        n_expert=128,
        n_expert_used=8,
        n_ff_exp=768,
        n_ff=6144,
        n_vocab=151_936,
        n_ctx=40_960,
        rope_freq_base=1e6,
    ),
    "gpt-oss-20b": Shape(
        arch="gpt-oss",
        n_layer=24,
        n_embd=2880,
        n_head=64,
        n_head_kv=8,
        head_dim=64,
        n_expert=32,
        n_expert_used=4,
        n_ff_exp=2880,
        n_ff=2880,
        n_vocab=201_088,
        n_ctx=131_072,
        rope_freq_base=150_000.0,
        n_swa=128,
        expert_type=GGMLType.MXFP4,
    ),
    "mixtral-8x7b": Shape(
        arch="llama",
        n_layer=32,
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_expert=8,
        n_expert_used=2,
        n_ff_exp=14_336,
        n_ff=14_336,
        n_vocab=32_000,
        n_ctx=32_768,
        rope_freq_base=1e6,
    ),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write. ``ne`` is in ggml order; ``std`` is the standard deviation of its weights."""

    name: str
    type: GGMLType
    ne: tuple[int, ...]
    std: float
    mean: float = 0.0  # used for F32 tensors only

    @property
    def n_run(self) -> int:
        """Parts that start at pool blocks of their own: the experts, or the tensor as a whole."""
        return self.ne[2] if len(self.ne) == 3 else 1

    @property
    def n_block(self) -> int:
        return math.prod(self.ne) // int(gguf.GGML_QUANT_SIZES[self.type][0])

    @property
    def n_bytes(self) -> int:
        return self.n_block * int(gguf.GGML_QUANT_SIZES[self.type][1])


# What llama.cpp stores instead when rows do not divide into blocks of 256.
# Source: tensor_type_fallback in src/llama-quant.cpp.
FALLBACK = {GGMLType.Q4_K: GGMLType.Q5_0, GGMLType.Q6_K: GGMLType.Q8_0}


def weight(name: str, type_: GGMLType, *ne: int, std: float | None = None, gain: float = 1.0) -> Tensor:
    """A weight matrix, or a stack of them. Its std, ``gain / sqrt(n_in)``, keeps the scale of its input."""
    block, _ = gguf.GGML_QUANT_SIZES[type_]
    stored = type_ if ne[0] % block == 0 else FALLBACK[type_]
    return Tensor(f"{name}.weight", stored, ne, gain / math.sqrt(ne[0]) if std is None else std)


def norm(name: str, n: int) -> Tensor:
    return Tensor(f"{name}.weight", GGMLType.F32, (n,), std=0.0, mean=1.0)


def bias(name: str, *ne: int) -> Tensor:
    return Tensor(f"{name}.bias", GGMLType.F32, ne, std=0.02)


def attention_tensors(shape: Shape, layer: int, type_: GGMLType) -> Iterator[Tensor]:
    blk = f"blk.{layer}"
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    yield norm(f"{blk}.attn_norm", shape.n_embd)
    for name, n_in, n_out, gain in (
        ("attn_q", shape.n_embd, n_q, 1.0),
        ("attn_k", shape.n_embd, n_kv, 1.0),
        ("attn_v", shape.n_embd, n_kv, 1.0),
        ("attn_output", n_q, shape.n_embd, shape.residual_gain),
    ):
        yield weight(f"{blk}.{name}", type_, n_in, n_out, gain=gain)
        if shape.arch == "gpt-oss":
            yield bias(f"{blk}.{name}", n_out)
    if shape.arch == "gpt-oss":
        yield Tensor(f"{blk}.attn_sinks.weight", GGMLType.F32, (shape.n_head,), std=1.0)
    if shape.arch == "qwen3moe":
        yield norm(f"{blk}.attn_q_norm", shape.head_dim)
        yield norm(f"{blk}.attn_k_norm", shape.head_dim)
    yield norm(f"{blk}.{'post_attention_norm' if shape.arch == 'gpt-oss' else 'ffn_norm'}", shape.n_embd)


def ffn_tensors(
    shape: Shape, blk: str, suffix: str, type_: GGMLType, n_ff: int, *n_expert: int
) -> Iterator[Tensor]:
    """Gate, up and down matrices; ``n_expert`` makes them stacks with one matrix per expert."""
    yield weight(f"{blk}.ffn_gate{suffix}", type_, shape.n_embd, n_ff, *n_expert)
    yield weight(f"{blk}.ffn_up{suffix}", type_, shape.n_embd, n_ff, *n_expert)
    yield weight(f"{blk}.ffn_down{suffix}", type_, n_ff, shape.n_embd, *n_expert, gain=shape.residual_gain)


def expert_tensors(shape: Shape, layer: int, type_: GGMLType) -> Iterator[Tensor]:
    blk, n_embd, n_expert = f"blk.{layer}", shape.n_embd, shape.n_expert
    yield weight(f"{blk}.ffn_gate_inp", GGMLType.F32, n_embd, n_expert)
    yield from ffn_tensors(shape, blk, "_exps", shape.expert_type or type_, shape.n_ff_exp, n_expert)
    if shape.n_expert_shared:
        yield from ffn_tensors(shape, blk, "_shexp", type_, shape.n_ff_exp * shape.n_expert_shared)
    if shape.arch == "gpt-oss":
        yield bias(f"{blk}.ffn_gate_inp", n_expert)
        yield bias(f"{blk}.ffn_gate_exps", shape.n_ff_exp, n_expert)
        yield bias(f"{blk}.ffn_up_exps", shape.n_ff_exp, n_expert)
        yield bias(f"{blk}.ffn_down_exps", n_embd, n_expert)


def model_tensors(shape: Shape, type_: GGMLType) -> Iterator[Tensor]:
    """Every tensor that llama.cpp asks for, in file order.

    Source: ``load_arch_tensors`` in src/models/deepseek.cpp, qwen3moe.cpp, openai-moe.cpp and llama.cpp.
    """
    # Embeddings as large as what all layers add, so that routing depends on the token in every layer.
    yield weight("token_embd", type_, shape.n_embd, shape.n_vocab, std=1.0)
    yield norm("output_norm", shape.n_embd)
    yield weight("output", type_, shape.n_embd, shape.n_vocab)
    for layer in range(shape.n_layer):
        yield from attention_tensors(shape, layer, type_)
        if layer < shape.n_layer_dense:
            yield from ffn_tensors(shape, f"blk.{layer}", "", type_, shape.n_ff)
        else:
            yield from expert_tensors(shape, layer, type_)


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a quantised block keeps its scale, and the minimum that centres its weights on zero.

    ``at`` and ``min_at`` are byte offsets of float16 values; the minimum is ``min_factor`` times the scale.
    Source: the block structs in ggml/src/ggml-common.h.
    """

    at: int
    min_at: int | None = None
    min_factor: float = 0.0


SCALES = {
    GGMLType.Q4_0: Scale(0),
    GGMLType.Q5_0: Scale(0),
    GGMLType.Q8_0: Scale(0),
    GGMLType.Q4_K: Scale(0, min_at=2, min_factor=7.5),  # the mean of a random 4-bit weight
    GGMLType.Q6_K: Scale(208),
}


def random_blocks(
    type_: GGMLType, n_block: int, std: float, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Random blocks, as bytes ``(n_block, block_bytes)``, that dequantise to weights of deviation ``std``."""
    if type_ is GGMLType.F16:
        values = rng.standard_normal((n_block, 1), dtype=np.float32) * np.float32(std)
        half: np.ndarray[Any, Any] = values.astype(np.float16)
        return half.view(np.uint8)
    _, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = rng.integers(0, 256, (n_block, block_bytes), dtype=np.uint8)
    if type_ is GGMLType.Q4_K:  # its eight sub-blocks: each minimum must equal the scale beside it
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    # Signs: 4-bit weights run from -8 to 7. Their mean of -0.5, left in every block, would grow from layer to
    # layer until all tokens look alike and choose the same experts.
    signs = rng.choice(np.array([-1, 1], np.float32), (n_block, 1))
    set_scales(blocks, type_, signs)
    unit = np.std(dequantize(blocks[:4096], type_))
    set_scales(blocks, type_, signs * (np.float32(std) / unit))
    return blocks


def set_scales(blocks: np.ndarray[Any, Any], type_: GGMLType, scales: np.ndarray[Any, Any]) -> None:
    """Give each block its scale from ``scales``, of shape ``(n_block, 1)``.

    MXFP4 takes the nearest power of two and no sign; its values are symmetric.
    """
    if type_ is GGMLType.MXFP4:
        blocks[:, :1] = 127 + np.round(np.log2(np.abs(scales)))  # E8M0: an exponent with bias 127
        return
    layout = SCALES[type_]
    blocks[:, layout.at : layout.at + 2] = scales.astype(np.float16).view(np.uint8)
    if layout.min_at is not None:
        minimums = (scales * layout.min_factor).astype(np.float16)
        blocks[:, layout.min_at : layout.min_at + 2] = minimums.view(np.uint8)


class Pool:
    """A ring of random blocks of one type. Each run through it starts at another block.

    The number of blocks is prime: a row of any length starts elsewhere than the rows before it, and the
    starts of the runs come back only after every block has been one. The pool is then filled anew.
    """

    def __init__(self, type_: GGMLType, std: float, rng: np.random.Generator) -> None:
        _, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        self.type = type_
        self.std = std
        self.block_bytes = int(block_bytes)
        self.n_block = prime_below(POOL_BYTES // self.block_bytes)
        self._rng = rng
        self._stride = int(self.n_block * 0.618)  # golden ratio: neighbouring runs start far apart
        self._n_run = 0
        self._ring = memoryview(b"")

    def run(self, n_block: int) -> Iterator[memoryview]:
        """The bytes of the next ``n_block`` blocks, in pieces of at most ``POOL_BYTES``."""
        if self._n_run % self.n_block == 0:
            self._ring = random_blocks(self.type, self.n_block, self.std, self._rng).reshape(-1).data
        position = self._n_run * self._stride % self.n_block
        self._n_run += 1
        while n_block:
            n = min(n_block, self.n_block - position)
            yield self._ring[position * self.block_bytes : (position + n) * self.block_bytes]
            n_block -= n
            position = 0


def prime_below(n: int) -> int:
    """The largest prime below ``n``, by trial division."""
    while True:
        n -= 1
        if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)):
            return n


def tensor_bytes(tensors: list[Tensor], seed: int) -> Iterator[tuple[Tensor, Iterator[memoryview]]]:
    """Each tensor with its bytes in pieces. Consume the pieces in order: they share one random generator."""
    rng = np.random.default_rng(seed)
    pools: dict[tuple[GGMLType, float], Pool] = {}

    def pieces(tensor: Tensor) -> Iterator[memoryview]:
        if tensor.type is GGMLType.F32:
            values = rng.standard_normal(math.prod(tensor.ne), dtype=np.float32)
            yield (values * np.float32(tensor.std) + np.float32(tensor.mean)).view(np.uint8).data
            return
        key = (tensor.type, tensor.std)
        if key not in pools:
            pools[key] = Pool(*key, rng)
        for _ in range(tensor.n_run):
            yield from pools[key].run(tensor.n_block // tensor.n_run)

    for tensor in tensors:
        yield tensor, pieces(tensor)


def vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a GPT-2 byte-level BPE: all 256 bytes, then words " w", " w258", " w259", ..."""
    tokens = [END_OF_TEXT, *byte_symbols(), "Ġw", *(f"Ġw{token}" for token in range(N_VOCAB_MIN, n_vocab))]
    return tokens, ["Ġ w"]


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a GPT-2 vocabulary.

    Source: ``bytes_to_unicode`` in OpenAI's GPT-2 encoder: printable Latin-1 stands for itself, and the other
    bytes take the characters from U+0100 on, in order.
    """
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    """The keys that llama.cpp reads for these architectures (``load_arch_hparams``), and the vocabulary."""
    writer.add_name(f"synthetic {name}")
    writer.add_description(
        f"Random weights in the shape of {name}, {shape.n_layer} layers. Its text is noise."
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_freq_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_expert_used)
    if shape.arch != "llama":  # where n_ff is the experts' width
        writer.add_expert_feed_forward_length(shape.n_ff_exp)
    if shape.arch == "deepseek":
        writer.add_leading_dense_block_count(shape.n_layer_dense)
        writer.add_expert_shared_count(shape.n_expert_shared)
        writer.add_expert_weights_scale(1.0)
    if shape.arch == "gpt-oss":
        writer.add_sliding_window(shape.n_swa)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    add_vocabulary(writer, shape.n_vocab)


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    tokens, merges = vocabulary(n_vocab)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_vocab_size(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token == END_OF_TEXT else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def write_model(
    path: Path, shape: Shape, name: str, tensors: list[Tensor], seed: int, advance: Callable[[int], None]
) -> None:
    """Write the whole file, calling ``advance`` with the number of tensor bytes just written.

    gguf writes the header and the tensor table. It wants every tensor whole in memory, so the data section
    is written here, piece by piece.
    """
    writer = gguf.GGUFWriter(path, shape.arch)
    add_metadata(writer, shape, name)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.ne[::-1], np.float32, tensor.n_bytes, raw_dtype=tensor.type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    [file] = writer.fout
    try:
        writer.write_padding(file, file.tell())
        for tensor, pieces in tensor_bytes(tensors, seed):
            for piece in pieces:
                file.write(piece)
                advance(len(piece))
            writer.write_padding(file, tensor.n_bytes)
    finally:
        writer.close()


def check_destination(out: Path, n_bytes: int, force: bool) -> None:
    """Raises: click.ClickException if the file must not or cannot be written; nothing is written yet."""
    if out.exists() and not force:
        raise click.ClickException(f"{out} exists already.\nGive another name, or --force to replace it.")
    if not out.parent.is_dir():
        raise click.ClickException(f"{out.parent} is not a folder.\nCreate it first.")
    free_bytes = shutil.disk_usage(out.parent).free
    if n_bytes + HEADER_BYTES > free_bytes:
        raise click.ClickException(
            f"{out} would take {n_bytes / 1e9:.1f} GB; {free_bytes / 1e9:.1f} GB are free on its disk.\n"
            "Use fewer --layers or a smaller --type."
        )


@click.command(
    epilog="""\b
Examples:
  python scripts/make_synthetic.py --shape qwen3-30b-a3b --type Q4_K -o qwen3.gguf
  python scripts/make_synthetic.py --shape gpt-oss-20b --layers 2 -o gpt-oss-2.gguf
  python scripts/make_synthetic.py --shape mixtral-8x7b --layers 2 --shrink 16 --vocab 512 -o tiny.gguf"""
)
@click.option(
    "--shape", "name", type=click.Choice(sorted(SHAPES)), required=True, help="Model whose sizes to take."
)
@click.option("--layers", type=click.IntRange(min=1), help="Number of layers.  [default: as the model has]")
@click.option(
    "--type",
    "type_name",
    type=click.Choice([type_.name for type_ in (*SCALES, GGMLType.F16)]),
    default="Q4_0",
    show_default=True,
    help="Type of the weights. The experts of gpt-oss are MXFP4 whatever this says.",
)
@click.option(
    "--vocab", type=click.IntRange(min=N_VOCAB_MIN), help="Number of tokens.  [default: as the model has]"
)
@click.option(
    "--shrink",
    type=click.Choice(["1", "2", "4", "8", "16"]),
    default="1",
    show_default=True,
    help="Divide widths and heads by this; experts stay as many.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same bytes."
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def main(
    name: str,
    layers: int | None,
    type_name: str,
    vocab: int | None,
    shrink: str,
    seed: int,
    out: Path,
    force: bool,
) -> None:
    """Write a MoE model of a real shape with random weights, for tests and measurements."""
    real = SHAPES[name]
    shape = replace(real.shrunk(int(shrink)), n_layer=layers or real.n_layer, n_vocab=vocab or real.n_vocab)
    if shape.n_layer <= shape.n_layer_dense:
        raise click.ClickException(f"The first layer of {name} has no experts.\nUse --layers 2 or more.")
    tensors = list(model_tensors(shape, GGMLType[type_name]))
    n_bytes = sum(-(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    check_destination(out, n_bytes, force)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with click.progressbar(
            length=n_bytes, label=f"{out.name}, {n_bytes / 1e9:.1f} GB", file=sys.stderr
        ) as bar:
            write_model(part, shape, name, tensors, seed, bar.update)
        part.replace(out)
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    click.echo(out)


if __name__ == "__main__":
    main()
