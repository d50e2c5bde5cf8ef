"""The memory of a context: what llama.cpp allocates for attention (KV) and recurrent state, layer by layer.

The rules are those of llama.cpp 0c1e57098, one sequence, flash attention on or automatic (its defaults).
An architecture whose rule is not known here gives None, never a guess.
Sources: ``llama_model::create_memory`` in src/llama-model.cpp, ``llama_kv_cache`` in src/llama-kv-cache.cpp,
``llama_hparams`` in src/llama-hparams.cpp, ``load_arch_hparams`` in src/models/*.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..gguf.model import MAX_LAYERS, Model

# KV type -> (elements per block, bytes per block)
KV_TYPES = {"f16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}
CELL_PADDING = 256  # llama.cpp rounds contexts and windows up to this
N_UBATCH = 512  # llama.cpp's default; a window's cache holds one batch more than the window

# Every layer attends to the whole context, keys and values are stored as they are (or compressed: MLA).
_PLAIN_NAMES = """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm
    command-r dbrx deci deepseek deepseek2 deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone falcon gemma
    glm4 glm4moe gpt2 gptj gptneox granite granitemoe grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl
    hy_v3 internlm2 jais jais2 llama llama-embed maincoder minicpm minicpm3 minimax-m2 mistral3 mistral4
    mpt nemotron olmo olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm starcoder
    starcoder2 xverse
"""
_PLAIN = frozenset(_PLAIN_NAMES.split())
# Diffusion models compute every position again at each step.
_NO_CACHE = frozenset(("dream", "llada", "llada-moe", "rnd1"))
# A layer without KV heads is recurrent.
_RECURRENT_WITHOUT_HEADS = frozenset(
    ("bailingmoe3", "granitehybrid", "jamba", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "plamo2")
)
# All layers are recurrent but each n-th.
_FULL_ATTENTION_INTERVAL = {"minimax-01": 8, "qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
_NEMOTRON_H = frozenset(("nemotron_h", "nemotron_h_moe"))
_ALL_RECURRENT = frozenset(("mamba", "mamba2"))
_BOTH_IN_EVERY_LAYER = frozenset(("falcon-h1",))
# A second cache holds the keys by which a sparse attention chooses what to attend to.
_INDEXED = frozenset(("deepseek32", "glm-dsa", "hy_v4", "minimax-m3"))
_NO_FLASH_ATTENTION = frozenset(("grok",))


@dataclass(frozen=True, slots=True)
class _Window:
    """Which layers see a sliding window only: all but one of every ``period``, unless the file lists them.

    ``period`` None means that the file has to list them, 0 that all layers do. ``default`` is the window of a
    file that states none (None: llama.cpp does not load such a file, 0: there is no window); ``fixed`` is
    used whatever the file states.
    """

    period: int | None
    full_first: bool = False
    default: int | None = None
    fixed: int | None = None


_WINDOWS = {
    "afmoe": _Window(4, default=0),
    "cohere2": _Window(4),
    "cohere2moe": _Window(4, full_first=True),
    "exaone-moe": _Window(4),
    "gemma2": _Window(2, default=4096),
    "gemma3": _Window(6, default=0),
    "gemma3n": _Window(5),
    "gemma4": _Window(None),
    "gpt-oss": _Window(2),
    "granite_swa": _Window(None),
    "laguna": _Window(4, full_first=True, default=0),
    "lfm2": _Window(0, default=0),
    "llama4": _Window(4, default=8192, fixed=8192),
    "maple": _Window(None),
    "mellum": _Window(4, default=0),
    "mimo2": _Window(None),
    "muse-glimmer": _Window(4),
    "olmo2": _Window(4, default=0),
    "plamo3": _Window(8, default=0),
    "smallthinker": _Window(4, full_first=True, default=0, fixed=4096),
    "spark2_5": _Window(None),
    "step35": _Window(None),
}
_KNOWN = (
    _PLAIN
    | _NO_CACHE
    | _RECURRENT_WITHOUT_HEADS
    | _FULL_ATTENTION_INTERVAL.keys()
    | _NEMOTRON_H
    | _ALL_RECURRENT
    | _BOTH_IN_EVERY_LAYER
    | _INDEXED
    | _WINDOWS.keys()
    | {"exaone4"}
)


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """Bytes by layer: ``attention`` grows with the context (up to a window), ``recurrent`` does not."""

    attention: tuple[int, ...]
    recurrent: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        return sum(self.attention)

    @property
    def state_bytes(self) -> int:
        return sum(self.recurrent)

    @property
    def n_bytes(self) -> int:
        return self.kv_bytes + self.state_bytes


def context_memory(
    model: Model, n_ctx: int, kv_type: str = "f16", *, n_ubatch: int = N_UBATCH, swa_full: bool = False
) -> ContextMemory | None:
    """What llama.cpp allocates for a context of ``n_ctx`` tokens, K and V both of ``kv_type``.

    ``swa_full`` keeps the whole context in sliding-window layers too. It is the default of
    ``llama_context_default_params``, but not of llama.cpp's programs.

    Returns: None where the architecture's rule is unknown, the file lacks what the rule needs, or llama.cpp
    would refuse the type (a head that is no multiple of its block; a quantised V without flash attention).
    """
    if model.architecture not in _KNOWN or not 0 < model.get("block_count", 0) <= MAX_LAYERS:
        return None
    layout = _Layout(model)
    window = layout.window
    if window is None or not layout.accepts(kv_type):
        return None
    n_cells = _padded(n_ctx)
    n_window_cells = n_cells if swa_full else min(n_cells, _padded(window.size + n_ubatch))
    attention = []
    for layer in range(layout.n_layer_all):
        in_window = layer in window.layers
        rows = layout.attention_rows(layer, in_window)
        if rows is None or min(rows, default=0) < 0:
            return None
        n_row_bytes = sum(_row_bytes(row, kv_type) for row in rows)
        attention.append(n_row_bytes * (n_window_cells if in_window else n_cells))
    recurrent = [layout.state_bytes if layout.is_recurrent(n) else 0 for n in range(layout.n_layer_all)]
    return ContextMemory(tuple(attention), tuple(recurrent))


def _padded(n_cells: int) -> int:
    return -(-n_cells // CELL_PADDING) * CELL_PADDING


def _row_bytes(n_elements: int, kv_type: str) -> int:
    block, n_bytes = KV_TYPES[kv_type]
    return n_elements // block * n_bytes


@dataclass(frozen=True, slots=True)
class _Windowed:
    """The size of the sliding window, and the layers that have it."""

    size: int
    layers: frozenset[int]


class _Layout:
    """A model's attention, as llama.cpp reads it from the metadata."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.arch = model.architecture
        self.n_layer_all = model.get("block_count", 0)
        # the last layers may be draft heads (multi-token prediction), which a usual context never runs
        self.n_layer = self.n_layer_all - max(0, model.get("nextn_predict_layers", 0))
        self.n_head = model.per_layer("attention.head_count", 0)
        stated = f"{self.arch}.attention.head_count_kv" in model.metadata
        self.n_head_kv = model.per_layer("attention.head_count_kv", 0) if stated else self.n_head

    @property
    def first_n_head(self) -> int:
        return self.n_head[0] if self.n_head else 0

    def head_dim(self, kind: str, in_window: bool) -> int:
        """Elements of one head's key or value (``kind``)."""
        if self.first_n_head == 0:
            return 0
        default = self.model.get("embedding_length", 0) // self.first_n_head
        full = self.model.get(f"attention.{kind}_length", default)
        return self.model.get(f"attention.{kind}_length_swa", full) if in_window else full

    def accepts(self, kv_type: str) -> bool:
        block = KV_TYPES[kv_type][0]
        if block > 1 and self.arch in _NO_FLASH_ATTENTION:
            return False
        heads = [self.head_dim(kind, in_window) for kind in ("key", "value") for in_window in (False, True)]
        return not any(head % block for head in heads)

    @cached_property
    def is_mla(self) -> bool:
        """The compressed latent stands in for keys and values, so only K is stored."""
        return (
            self.model.get("attention.key_length_mla", 0) > 0
            and self.model.get("attention.value_length_mla", 0) > 0
        )

    def attention_rows(self, layer: int, in_window: bool) -> list[int] | None:
        """Elements that one token takes in each of the layer's caches; None if unknown."""
        if not self.has_attention(layer):
            return []
        n_head_kv = self.n_head_kv[layer]
        rows = [self.head_dim("key", in_window) * n_head_kv]
        if not self.is_mla:
            rows.append(self.head_dim("value", in_window) * n_head_kv)
        if self.arch in _INDEXED:
            indexed = self.has_indexer(layer)
            if indexed is None:
                return None
            if indexed:
                rows.append(self.model.get("attention.indexer.key_length", 0))
                # llama.cpp builds this cache like any other: a value row of one head comes with it
                rows += [] if self.is_mla else [self.head_dim("value", in_window)]
        return rows

    def has_attention(self, layer: int) -> bool:
        arch = self.arch
        if arch in _NO_CACHE or arch in _ALL_RECURRENT:
            return False
        if arch in _BOTH_IN_EVERY_LAYER:
            return True
        if arch in _NEMOTRON_H:
            return not self.is_recurrent(layer) and self.n_ff[layer] == 0
        if arch in _RECURRENT_WITHOUT_HEADS:
            return not self.is_recurrent(layer)
        if arch == "gemma3n" and layer >= 20:  # the later layers read the cache of earlier ones
            return False
        if arch == "gemma4" and layer >= self.n_layer_all - self.model.get("attention.shared_kv_layers", 0):
            return False
        return (layer < self.n_layer or self.n_layer == 0) and not self.is_recurrent(layer)

    def has_indexer(self, layer: int) -> bool | None:
        if layer >= self.n_layer:
            return False
        if self.arch == "minimax-m3":
            return layer >= self.model.get("leading_dense_block_count", 0)
        if self.arch == "deepseek32":
            return True
        if self.arch == "hy_v4" and self.model.get("attention.indexer.top_k", 0) == 0:
            return False
        types = self.model.metadata.get(f"{self.arch}.attention.indexer.types")
        if isinstance(types, tuple):
            return layer < len(types) and bool(types[layer])
        if types is None and self.arch == "glm-dsa" and self.model.get("context_length", 0) < 2**20:
            return True  # GLM 5 and 5.1; for later ones llama.cpp has a table of its own
        return bool(types) if isinstance(types, (int, bool)) else None

    def is_recurrent(self, layer: int) -> bool:
        arch = self.arch
        if layer >= self.n_layer:
            return False
        if arch in _ALL_RECURRENT or arch in _BOTH_IN_EVERY_LAYER:
            return True
        if arch in _RECURRENT_WITHOUT_HEADS:
            return self.n_head_kv[layer] == 0
        if arch in _NEMOTRON_H:
            return self.n_head_kv[layer] == 0 and self.n_ff[layer] == 0
        if arch in _FULL_ATTENTION_INTERVAL:
            listed = self.model.metadata.get(f"{arch}.attention.recurrent_layers")
            if isinstance(listed, tuple):
                return layer < len(listed) and bool(listed[layer])
            if isinstance(listed, (int, bool)):
                return bool(listed)
            interval = self.model.get("full_attention_interval", _FULL_ATTENTION_INTERVAL[arch])
            return (layer + 1) % max(interval, 1) != 0
        return False

    @cached_property
    def n_ff(self) -> tuple[int, ...]:
        return self.model.per_layer("feed_forward_length", 0)

    @cached_property
    def state_bytes(self) -> int:
        """The state of one recurrent layer, f32: that of its convolution and that of the recurrence.

        Source: ``llama_hparams::n_embd_r`` and ``n_embd_s``.
        """
        get = self.model.get
        conv, inner, state = get("ssm.conv_kernel", 0), get("ssm.inner_size", 0), get("ssm.state_size", 0)
        n_conv = max(conv - 1, 0) * (inner + 2 * get("ssm.group_count", 0) * state)
        n_state = state * inner
        kda = get("kda.head_dim", 0)
        if get("shortconv.l_cache", 0) > 0:
            n_conv = get("embedding_length", 0) * (get("shortconv.l_cache", 0) - 1)
        elif kda > 0:
            n_conv = 3 * (conv - 1 if conv > 0 else 3) * self.first_n_head * kda
            n_state = kda * kda * self.first_n_head
        elif self.arch == "minimax-01":
            n_state = self.head_dim("key", False) ** 2 * self.first_n_head
        return 4 * (n_conv + n_state)

    @cached_property
    def window(self) -> _Windowed | None:
        """The sliding window and its layers, none of them where there is no window; None if unknown."""
        rule = _WINDOWS.get(self.arch)
        if self.arch == "exaone4":  # only the 32B model has one
            rule = _Window(4, default=4096) if self.n_layer == 64 else None
        if rule is None:
            return _Windowed(0, frozenset())
        stated = self.model.metadata.get(f"{self.arch}.attention.sliding_window", rule.default)
        if not isinstance(stated, int):
            return None
        size = stated if rule.fixed is None or stated == 0 else rule.fixed
        if size == 0:
            return _Windowed(0, frozenset())
        listed = self.model.metadata.get(f"{self.arch}.attention.sliding_window_pattern", rule.period)
        if isinstance(listed, tuple):
            return _Windowed(size, frozenset(n for n, value in enumerate(listed) if value))
        if rule.period is None or not isinstance(listed, int):
            return None
        full = 0 if rule.full_first else listed - 1
        return _Windowed(size, frozenset(n for n in range(self.n_layer) if listed == 0 or n % listed != full))
