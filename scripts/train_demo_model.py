"""Train the bundled demo model: a small DeepSeekMoE, 64 routed experts and 2 shared, on four public texts.

``corpus`` builds the folder of texts from two Debian packages and the Python standard library; ``train``
trains a tokenizer and the model on it and writes GGUF files. The forward pass below is llama.cpp's graph for
the architecture "deepseek" (src/models/deepseek.cpp), and weights carry their GGUF names throughout.

Training stops by the clock, so two runs give models of equal quality, not of equal bytes.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import quantize

try:
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as error:
    MISSING: str | None = error.name or str(error)
else:
    MISSING = None

log = logging.getLogger("train_demo_model")

END_OF_TEXT = "<|endoftext|>"
N_HELD_OUT = 8192  # tokens at the end of every text that are never trained on
LANGUAGES = ("en-US", "zh-CN")
STDLIB_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model. Names follow llama.cpp's hyperparameters."""

    n_layer: int = 7
    n_layer_dense: int = 1
    n_embd: int = 256
    n_head: int = 8
    n_expert: int = 64
    n_expert_used: int = 6
    n_expert_shared: int = 2
    n_ff_exp: int = 64
    n_ff: int = 768
    n_vocab: int = 6144
    n_ctx_train: int = 256
    rms_eps: float = 1e-6
    rope_freq_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. ``learning_rate`` is the peak after 100 steps of warm-up; a cosine takes it to 5 %."""

    minutes: float
    learning_rate: float
    n_batch: int
    balance_weight: float = 0.01
    weight_decay: float = 0.05
    checkpoint_s: float = 600.0

    def rate(self, step: int, fraction: float) -> float:
        """Learning rate at ``step``, when ``fraction`` of the time has passed."""
        cosine = 0.5 * (1 + math.cos(math.pi * fraction))
        return self.learning_rate * min(1.0, (step + 1) / 100) * (0.95 * cosine + 0.05)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Quality on a text the model has not seen. ``loss`` is in nats per token.

    ``hot_share`` is the share of routings that each layer's busiest quarter of the experts takes.
    """

    loss: float
    hot_share: float


# --- the model ---

Weights = dict[str, Any]  # GGUF tensor name -> torch.Tensor, in file order


def init_weights(shape: Shape) -> Weights:
    """Random weights that keep the scale of their input, smaller where they feed the residual stream."""

    def matrix(*size: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*size) / math.sqrt(size[-1]) * gain

    n_embd, n_expert, n_ff_exp = shape.n_embd, shape.n_expert, shape.n_ff_exp
    residual = 1 / math.sqrt(2 * shape.n_layer)
    weights: Weights = {
        "token_embd.weight": torch.randn(shape.n_vocab, n_embd) * 0.02,
        "output_norm.weight": torch.ones(n_embd),
    }
    for layer in range(shape.n_layer):
        dense = layer < shape.n_layer_dense
        n_ff, suffix = (shape.n_ff, "") if dense else (n_ff_exp * shape.n_expert_shared, "_shexp")
        blk = {
            "attn_norm": torch.ones(n_embd),
            "ffn_norm": torch.ones(n_embd),
            "attn_q": matrix(n_embd, n_embd),
            "attn_k": matrix(n_embd, n_embd),
            "attn_v": matrix(n_embd, n_embd),
            "attn_output": matrix(n_embd, n_embd, gain=residual),
            f"ffn_gate{suffix}": matrix(n_ff, n_embd),
            f"ffn_up{suffix}": matrix(n_ff, n_embd),
            f"ffn_down{suffix}": matrix(n_embd, n_ff, gain=residual),
        }
        if not dense:
            blk["ffn_gate_inp"] = matrix(n_expert, n_embd)
            blk["ffn_gate_exps"] = matrix(n_expert, n_ff_exp, n_embd)
            blk["ffn_up_exps"] = matrix(n_expert, n_ff_exp, n_embd)
            blk["ffn_down_exps"] = matrix(n_expert, n_embd, n_ff_exp, gain=residual)
        weights |= {f"blk.{layer}.{name}.weight": weight for name, weight in blk.items()}
    return weights


def forward(
    weights: Weights, shape: Shape, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits ``(batch, token, vocab)``, balance loss, and routings per expert ``(MoE layer, expert)``."""
    angles = rope_angles(shape, ids.shape[1])
    x = weights["token_embd.weight"][ids]
    balance, counts = x.new_zeros(()), []
    for layer in range(shape.n_layer):
        blk = {name: weights.get(f"blk.{layer}.{name}.weight") for name in BLOCK_TENSORS}
        x = x + attention(blk, shape, rms_norm(x, blk["attn_norm"], shape), angles)
        h = rms_norm(x, blk["ffn_norm"], shape)
        if layer < shape.n_layer_dense:
            x = x + swiglu(h, blk["ffn_gate"], blk["ffn_up"], blk["ffn_down"])
            continue
        routed, layer_balance, layer_counts = experts(blk, shape, h.reshape(-1, shape.n_embd))
        shared = swiglu(h, blk["ffn_gate_shexp"], blk["ffn_up_shexp"], blk["ffn_down_shexp"])
        x = x + (shared + routed.view_as(shared))
        balance = balance + layer_balance
        counts.append(layer_counts)
    logits = rms_norm(x, weights["output_norm.weight"], shape) @ weights["token_embd.weight"].T
    return logits, balance / len(counts), torch.stack(counts)


BLOCK_TENSORS = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate_inp"),
    *(f"ffn_{part}{suffix}" for suffix in ("", "_shexp", "_exps") for part in ("gate", "up", "down")),
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    return F.rms_norm(x, (shape.n_embd,), weight, shape.rms_eps)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def rope_angles(shape: Shape, n_token: int) -> torch.Tensor:
    """Rotation of each pair of dimensions at each position, ``(token, 1, head_dim / 2)``, in radians."""
    frequencies = shape.rope_freq_base ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    return (torch.arange(n_token).float()[:, None] * frequencies)[:, None]


def rope(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of ``x``, ``(batch, token, head, head_dim)``: ggml's LLAMA_ROPE_TYPE_NORM."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def attention(blk: Weights, shape: Shape, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    heads = (*x.shape[:2], shape.n_head, shape.head_dim)
    q = rope((x @ blk["attn_q"].T).view(heads), angles).transpose(1, 2)
    k = rope((x @ blk["attn_k"].T).view(heads), angles).transpose(1, 2)
    v = (x @ blk["attn_v"].T).view(heads).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(x.shape) @ blk["attn_output"].T


def experts(blk: Weights, shape: Shape, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output of the routed experts for ``x`` ``(token, n_embd)``, balance loss, routings per expert.

    Router weights are the softmax over all experts, not renormalised over the chosen ones. The balance loss
    is that of the Switch Transformer: 1 when all experts get equal shares.
    """
    share = F.softmax(x.float() @ blk["ffn_gate_inp"].T, -1)
    chosen_share, chosen = share.topk(shape.n_expert_used, -1)
    by_expert = chosen.reshape(-1).argsort()  # routings, grouped by expert
    counts = torch.bincount(chosen.reshape(-1), minlength=shape.n_expert)
    token = by_expert // shape.n_expert_used
    groups = zip(
        x[token].split(counts.tolist()),
        *(blk[f"ffn_{part}_exps"].unbind(0) for part in ("gate", "up", "down")),
        strict=True,
    )
    output = torch.cat([swiglu(*group) for group in groups]) * chosen_share.reshape(-1)[by_expert][:, None]
    balance = shape.n_expert * (share.mean(0) * (counts.float() / counts.sum())).sum()
    return torch.zeros_like(x).index_add(0, token, output), balance, counts


# --- training ---


def train_tokenizer(texts: dict[str, str], n_vocab: int) -> Tokenizer:
    """A GPT-2-style byte-level BPE over all texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=n_vocab, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    pieces = (text[start : start + 4000] for text in texts.values() for start in range(0, len(text), 4000))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def batches(
    data: dict[str, np.ndarray[Any, Any]], n_batch: int, n_ctx: int, seed: int
) -> Iterator[torch.Tensor]:
    """Endless batches ``(n_batch, n_ctx + 1)`` of random cuts.

    A text comes up in proportion to its length to the power of 0.7, so that short ones are not forgotten.
    """
    rng = np.random.default_rng(seed)
    names = list(data)
    odds = np.array([len(data[name]) ** 0.7 for name in names])
    odds /= odds.sum()
    while True:
        rows = []
        for _ in range(n_batch):
            text = data[names[rng.choice(len(names), p=odds)]]
            start = rng.integers(0, len(text) - n_ctx - 1)
            rows.append(text[start : start + n_ctx + 1])
        yield torch.from_numpy(np.stack(rows))


def cross_entropy(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def evaluate(weights: Weights, shape: Shape, held_out: dict[str, np.ndarray[Any, Any]]) -> dict[str, HeldOut]:
    result = {}
    n_row = shape.n_ctx_train + 1
    with torch.no_grad():
        for name, tokens in held_out.items():
            batch = torch.from_numpy(tokens[: 8 * n_row]).view(8, n_row)
            logits, _, counts = forward(weights, shape, batch[:, :-1])
            busiest = counts.sort(-1, descending=True).values[:, : shape.n_expert // 4]
            share = busiest.sum() / counts.sum()
            result[name] = HeldOut(cross_entropy(logits, batch).item(), share.item())
    return result


def optimise(
    weights: Weights,
    shape: Shape,
    recipe: Recipe,
    stream: Iterator[torch.Tensor],
    held_out: dict[str, np.ndarray[Any, Any]],
    checkpoint: Path,
) -> None:
    """Train ``weights`` in place until the recipe's time is over; save them to ``checkpoint`` on the way."""
    parameters = [weight.requires_grad_() for weight in weights.values()]
    optimiser = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    start, saved_s, step = time.monotonic(), 0.0, 0
    while (elapsed_s := time.monotonic() - start) < recipe.minutes * 60:
        rate = recipe.rate(step, elapsed_s / (recipe.minutes * 60))
        optimiser.param_groups[0]["lr"] = rate
        batch = next(stream)
        logits, balance, _ = forward(weights, shape, batch[:, :-1])
        loss = cross_entropy(logits, batch)
        optimiser.zero_grad(set_to_none=True)
        (loss + recipe.balance_weight * balance).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        step += 1
        if step % 25 == 0:
            log.info("step %d, %.0f s, loss %.3f, balance %.3f", step, elapsed_s, loss.item(), balance.item())
        if elapsed_s - saved_s > recipe.checkpoint_s:
            saved_s = elapsed_s
            log.info("held out: %s", evaluate(weights, shape, held_out))
            torch.save(weights, checkpoint)
    torch.save(weights, checkpoint)


# --- the files ---


def write_gguf(path: Path, weights: Weights, shape: Shape, tokenizer: Tokenizer, type_: GGMLType) -> None:
    """Write the model; norms and routers stay F32, as in every published MoE file."""
    writer = gguf.GGUFWriter(path, "deepseek")
    add_metadata(writer, shape)
    add_tokenizer(writer, tokenizer)
    for name, weight in weights.items():
        values = weight.detach().float().numpy()
        stored = GGMLType.F32 if values.ndim == 1 or "ffn_gate_inp" in name else type_
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("ggufmoe demo MoE")
    writer.add_description(
        f"{shape.n_layer} layers, {shape.n_expert} routed + {shape.n_expert_shared} shared experts, "
        f"top-{shape.n_expert_used}; trained on KJV, Debian handbook (en, zh) and Python stdlib"
    )
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(2048)  # RoPE goes on past n_ctx_train, at falling quality
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_freq_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_leading_dense_block_count(shape.n_layer_dense)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_expert_used)
    writer.add_expert_feed_forward_length(shape.n_ff_exp)
    writer.add_expert_shared_count(shape.n_expert_shared)
    writer.add_expert_weights_scale(1.0)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = json.loads(tokenizer.to_str())["model"]["merges"]  # strings before tokenizers 0.20, then pairs
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token == END_OF_TEXT else normal for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(vocab[END_OF_TEXT])
    writer.add_eos_token_id(vocab[END_OF_TEXT])
    writer.add_add_bos_token(False)


# --- the corpus ---


def bible_text(root: Path) -> str:
    """The King James Bible, verse after verse, from Debian's bible-kjv (public domain).

    Raises: OSError if the package is not under ``root``; subprocess.CalledProcessError if its program fails.
    """
    command = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-f", "gen1:1-rev22:21"]
    verses = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="ascii", check=True
    ).stdout
    return re.sub(r"^\w+:\d+ ", "", verses, flags=re.MULTILINE).replace("\n", " ")


class PageText(HTMLParser):
    """Collects the text of a page's body, with a space for every tag."""

    HIDDEN = frozenset({"head", "script", "style"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._n_hidden = 0  # open elements whose text does not show

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._n_hidden += tag in self.HIDDEN
        self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self._n_hidden -= tag in self.HIDDEN
        self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        if not self._n_hidden:
            self.parts.append(data)


def handbook_text(root: Path, language: str) -> str:
    """The Debian Administrator's Handbook, from Debian's debian-handbook (GPL-2+ or CC-BY-SA 3.0).

    Raises: OSError if the package is not under ``root``.
    """
    folder = root / "usr/share/doc/debian-handbook/html" / language
    pages = sorted(page for page in folder.iterdir() if page.suffix == ".html")
    parser = PageText()
    for page in pages:
        parser.feed(page.read_text(encoding="utf-8"))
    text = re.sub(r"[ \t]+", " ", "".join(parser.parts))
    return re.sub(r"\n\s*\n", "\n", text)


def stdlib_text(n_bytes: int) -> str:
    """Sources of this Python's standard library (PSF licence): whole files, shuffled, without tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    excluded = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = [
        path for path in sorted(folder.rglob("*.py")) if not excluded & set(path.relative_to(folder).parts)
    ]
    random.Random(0).shuffle(files)
    parts: list[str] = []
    for path in files:
        if n_bytes <= 0:
            break
        source = path.read_bytes()
        parts.append(source.decode("utf-8", errors="ignore"))
        n_bytes -= len(source)
    return "\n".join(parts)


# --- commands ---


@click.group(
    epilog="""\b
Examples:
  sudo apt install bible-kjv debian-handbook
  python scripts/train_demo_model.py corpus texts
  pip install 'ggufmoe[train]'
  python scripts/train_demo_model.py train texts demo.gguf --minutes 70
  python scripts/train_demo_model.py train texts more.gguf --minutes 42 --resume demo.gguf.pt --rate 1.2e-3"""
)
def cli() -> None:
    """Build the corpus of the bundled demo model, and train the model on it."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # to stderr


@cli.command(
    epilog="""\b
Without root rights, on Debian or Ubuntu:
  apt-get download bible-kjv bible-kjv-text debian-handbook
  for deb in *.deb; do dpkg -x "$deb" packages; done
  python scripts/train_demo_model.py corpus texts --root packages"""
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    show_default=True,
    help="Where the Debian packages are installed or unpacked.",
)
def corpus(folder: Path, root: Path) -> None:
    """Write kjv.txt, en-US.txt, zh-CN.txt and py.txt into FOLDER."""
    try:
        texts = {"kjv": bible_text(root), "py": stdlib_text(STDLIB_BYTES)}
        texts |= {language: handbook_text(root, language) for language in LANGUAGES}
    except (OSError, subprocess.CalledProcessError) as error:
        raise click.ClickException(
            f"{error}\nInstall the Debian packages bible-kjv and debian-handbook."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        click.echo(f"{path}: {len(text.encode()):,} bytes")


def read_texts(folder: Path) -> dict[str, str]:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    if not texts:
        raise click.ClickException(f"{folder} holds no .txt files.\nThe corpus command makes some.")
    return texts


def check_output(out: Path) -> None:
    """Refuse now what would otherwise fail, or destroy a file, at the end of a long run."""
    if out.suffix != ".gguf" or not out.parent.is_dir():
        raise click.ClickException(f"{out} must be a .gguf file in a folder that exists.")
    if out.exists():
        raise click.ClickException(f"{out} exists already.\nGive another name or remove it.")


@cli.command()
@click.argument("folder", metavar="TEXTS", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=90.0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--batch", type=click.IntRange(min=1), default=12, show_default=True, help="Cuts of 256 tokens per step."
)
@click.option("--rate", type=float, default=1.5e-3, show_default=True, help="Peak learning rate.")
@click.option(
    "--resume", type=click.Path(path_type=Path, exists=True), help="Weights (OUT.gguf.pt) to go on from."
)
def train(
    folder: Path, out: Path, minutes: float, threads: int, batch: int, rate: float, resume: Path | None
) -> None:
    """Train on the *.txt files of the folder TEXTS and write OUT as Q8_0.

    Beside OUT stand its F32 version (OUT-f32.gguf), the weights to resume from (OUT.pt) and the tokenizer.
    """
    if MISSING:
        raise click.ClickException(
            f"Training needs {MISSING}, which is missing: pip install 'ggufmoe[train]'"
        )
    check_output(out)
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    shape, recipe = Shape(), Recipe(minutes, rate, batch)
    texts = read_texts(folder)
    if resume:
        tokenizer = Tokenizer.from_file(str(resume.with_suffix(".tokenizer.json")))
        weights = torch.load(resume)
    else:
        tokenizer = train_tokenizer(texts, shape.n_vocab)
        weights = init_weights(shape)
    tokenizer.save(f"{out}.tokenizer.json")
    data = {name: np.array(tokenizer.encode(text).ids, np.int64) for name, text in texts.items()}
    for name, tokens in data.items():
        log.info("%s: %d tokens", name, len(tokens))
        if len(tokens) < 2 * N_HELD_OUT:
            raise click.ClickException(
                f"{name}.txt is too short: {len(tokens)} tokens of {2 * N_HELD_OUT} needed."
            )
    log.info("%d parameters", sum(weight.numel() for weight in weights.values()))
    held_out = {name: tokens[-N_HELD_OUT:] for name, tokens in data.items()}
    seen = {name: tokens[:-N_HELD_OUT] for name, tokens in data.items()}
    stream = batches(seen, recipe.n_batch, shape.n_ctx_train, seed=1 if resume else 0)
    optimise(weights, shape, recipe, stream, held_out, Path(f"{out}.pt"))
    write_gguf(out, weights, shape, tokenizer, GGMLType.Q8_0)
    write_gguf(out.with_name(f"{out.stem}-f32.gguf"), weights, shape, tokenizer, GGMLType.F32)
    for name, quality in evaluate(weights, shape, held_out).items():
        click.echo(
            f"{name}: held-out loss {quality.loss:.2f} nats/token, busiest quarter {quality.hot_share:.2f}"
        )


if __name__ == "__main__":
    cli()
