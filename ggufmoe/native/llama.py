"""llama.cpp's models, contexts and samplers as objects with a lifetime; every call survives an abort."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import NativeError
from . import declarations as c
from .aborts import guarded
from .cfile import c_file
from .devices import Device
from .library import collected_complaints, ggml, llama_cpp

# llama_flash_attn_type (llama.h)
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# ggml types that a KV cache can have
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How llama.cpp places what it loads itself.

    ``devices`` hold the dense weights of the last ``n_gpu_layers`` layers; ``overrides`` are (std::regex, buffer
    type) pairs, the first that is found in a tensor's name wins. ``repack`` lets the CPU's matrices be stored in
    its kernels' own order; ``mmap`` maps the file instead of reading it.
    """

    devices: tuple[Device, ...] = ()
    n_gpu_layers: int = 0
    overrides: tuple[tuple[str, int], ...] = ()
    repack: bool = False
    mmap: bool = True


class LlamaModel:
    """A loaded model. Freed by ``close``; contexts must be closed before it.

    ``offset`` is where in the file the GGUF begins: 0, or the stock table inside a block file.
    """

    def __init__(
        self,
        path: Path,
        plan: LoadPlan,
        on_progress: Callable[[float], None] | None = None,
        *,
        offset: int = 0,
    ) -> None:
        module = llama_cpp()
        ggml()
        params = module.llama_model_default_params()
        devices = (ctypes.c_void_p * (len(plan.devices) + 1))(*(d.address for d in plan.devices), None)
        overrides = (c.llama_model_tensor_buft_override * (len(plan.overrides) + 1))()
        for place, (pattern, buffer_type) in zip(overrides, plan.overrides, strict=False):
            place.pattern, place.buft = pattern.encode(), buffer_type
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        params.n_gpu_layers = plan.n_gpu_layers
        params.split_mode = c.LLAMA_SPLIT_MODE_LAYER
        params.load_mode = c.LLAMA_LOAD_MODE_MMAP if plan.mmap else c.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = plan.repack
        # without it a GPU's pinned host memory comes before the repacked form; --cold-store pinned asks by name
        params.no_host = plan.repack
        progress = module.llama_progress_callback(
            lambda done, _data: (on_progress(done) if on_progress else None) or True
        )
        params.progress_callback = progress
        self._keep = (devices, overrides, progress)
        with collected_complaints() as cause:
            self.address: int | None = guarded(_load, path, offset, params)
        if not self.address:
            raise NativeError(f"{path}: llama.cpp cannot load it: {cause()}")
        self.vocab = module.llama_model_get_vocab(self.address)
        self.n_vocab: int = module.llama_vocab_n_tokens(self.vocab)
        self.n_ctx_train: int = module.llama_model_n_ctx_train(self.address)
        self.has_tokenizer: bool = module.llama_vocab_type(self.vocab) != 0

    def close(self) -> None:
        if self.address:
            guarded(llama_cpp().llama_model_free, self.address)
            self.address = None

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``. With ``parse_special`` the names of control tokens in it become those tokens."""
        module, raw = llama_cpp(), text.encode("utf-8", "surrogatepass")
        size = len(raw) + 8
        tokens = (ctypes.c_int32 * size)()
        count = module.llama_tokenize(self.vocab, raw, len(raw), tokens, size, add_special, parse_special)
        if count < 0:
            tokens = (ctypes.c_int32 * -count)()
            count = module.llama_tokenize(
                self.vocab, raw, len(raw), tokens, -count, add_special, parse_special
            )
        return list(tokens[: max(count, 0)])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; a character may begin in one token and end in another."""
        module = llama_cpp()
        buffer = ctypes.create_string_buffer(256)
        size = module.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = module.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[: max(size, 0)]

    def is_end(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""
        return bool(llama_cpp().llama_vocab_is_eog(self.vocab, token))

    @property
    def bos(self) -> int:
        """The token that begins a text, or -1."""
        return int(llama_cpp().llama_vocab_bos(self.vocab))

    @property
    def eos(self) -> int:
        return int(llama_cpp().llama_vocab_eos(self.vocab))

    @property
    def adds_bos(self) -> bool:
        return bool(llama_cpp().llama_vocab_get_add_bos(self.vocab))

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), if it has one."""
        raw = llama_cpp().llama_model_chat_template(self.address, None)
        return raw.decode("utf-8", "replace") if raw else None


def _load(path: Path, offset: int, params: Any) -> int | None:
    module = llama_cpp()
    if not offset:
        return module.llama_model_load_from_file(os.fsencode(path), params)  # type: ignore[no-any-return]
    # llama.cpp reads, and maps, a GGUF from where the FILE stands; it needs the FILE only while it loads
    with c_file(path, offset) as file:
        return module.llama_model_load_from_file_ptr(file, params)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The size and kind of a context. ``n_batch`` is the most tokens of one call, ``n_ubatch`` of one graph."""

    n_ctx: int
    n_threads: int
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str = "auto"


class LlamaContext:
    """KV cache and compute buffers for one model. Freed by ``close``."""

    def __init__(self, model: LlamaModel, plan: ContextPlan) -> None:
        module = llama_cpp()
        params = module.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = plan.n_ctx, plan.n_batch, plan.n_ubatch
        params.n_seq_max = plan.n_seq_max
        params.n_threads = params.n_threads_batch = plan.n_threads
        params.type_k, params.type_v = KV_TYPES[plan.type_k], KV_TYPES[plan.type_v]
        params.flash_attn_type = FLASH_ATTENTION[plan.flash_attention]
        params.no_perf = True
        params.swa_full = False  # windows hold a window, as in llama.cpp's own programs
        self.model, self.plan = model, plan
        with collected_complaints() as cause:
            self.address: int | None = guarded(module.llama_init_from_model, model.address, params)
        if not self.address:
            raise NativeError(f"llama.cpp cannot make a context of {plan.n_ctx} tokens: {cause()}")
        self.n_ctx: int = module.llama_n_ctx(self.address)
        self._memory = module.llama_get_memory(self.address)
        self._batch = module.llama_batch_init(plan.n_batch, 0, plan.n_seq_max)

    def decode(
        self,
        tokens: Sequence[int],
        position: int,
        *,
        sequences: Sequence[int] | None = None,
        all_logits: bool = False,
    ) -> None:
        """Evaluate up to ``n_batch`` tokens from ``position`` on; logits of the last one, or of all.

        With ``sequences``, token ``i`` belongs to sequence ``sequences[i]`` and all stand at ``position``.
        Raises: NativeError if there is no room left in the KV cache, or the computation fails.
        """
        module, batch = llama_cpp(), self._batch
        last = len(tokens) - 1
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position if sequences else position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequences[i] if sequences else 0
            batch.logits[i] = all_logits or sequences is not None or i == last
        batch.n_tokens = len(tokens)
        with collected_complaints() as cause:
            status = guarded(module.llama_decode, self.address, batch)
        if status == 1:
            raise NativeError(
                f"The context of {self.n_ctx} tokens is full.",
                hint="Use a larger --context or a shorter text.",
            )
        if status != 0:
            raise NativeError(f"llama.cpp could not evaluate the tokens (status {status}): {cause()}")

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """The logits ``(n_vocab,)`` after token ``row`` of the last batch; valid until the next one."""
        pointer: Any = llama_cpp().llama_get_logits_ith(self.address, row)
        if not pointer:
            raise NativeError(f"llama.cpp holds no logits for row {row}.")
        return np.ctypeslib.as_array(pointer, (self.model.n_vocab,))

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp().llama_memory_clear(self._memory, True)

    @property
    def n_evaluated(self) -> int:
        """Tokens that sequence 0 holds, whatever was interrupted."""
        return int(llama_cpp().llama_memory_seq_pos_max(self._memory, 0)) + 1

    def truncate(self, n_tokens: int) -> bool:
        """Forget all tokens of sequence 0 from position ``n_tokens`` on.

        Returns: False where the cache cannot do that: recurrent state, or a sliding window that has moved on.
        """
        module = llama_cpp()
        if module.llama_memory_seq_pos_min(self._memory, 0) > 0:
            return False
        return bool(module.llama_memory_seq_rm(self._memory, 0, n_tokens, -1))

    def close(self) -> None:
        if self.address:
            llama_cpp().llama_batch_free(self._batch)
            guarded(llama_cpp().llama_free, self.address)
            self.address = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 takes the likeliest one, whatever the rest says."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None


class Sampler:
    """llama.cpp's own samplers in the order of its command line: penalties, top-k, top-p, min-p, temperature."""

    def __init__(self, sampling: Sampling) -> None:
        module = llama_cpp()
        self.address = module.llama_sampler_chain_init(module.llama_sampler_chain_default_params())
        parts = []
        if sampling.repeat_penalty != 1.0:
            parts.append(
                module.llama_sampler_init_penalties(sampling.repeat_last_n, sampling.repeat_penalty, 0.0, 0.0)
            )
        if sampling.temperature <= 0:
            parts.append(module.llama_sampler_init_greedy())
        else:
            seed = int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed
            parts += [
                module.llama_sampler_init_top_k(sampling.top_k),
                module.llama_sampler_init_top_p(sampling.top_p, 1),
                module.llama_sampler_init_min_p(sampling.min_p, 1),
                module.llama_sampler_init_temp(sampling.temperature),
                module.llama_sampler_init_dist(seed & 0xFFFFFFFF),
            ]
        for part in parts:
            module.llama_sampler_chain_add(self.address, part)

    def sample(self, context: LlamaContext) -> int:
        """Choose a token from the logits of the last evaluated one, and remember it for the penalties."""
        return int(guarded(llama_cpp().llama_sampler_sample, self.address, context.address, -1))

    def close(self) -> None:
        if self.address:
            llama_cpp().llama_sampler_free(self.address)
            self.address = None
