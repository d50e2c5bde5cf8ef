"""A loaded model whose experts are placed one by one, and the conversation with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ..errors import GgufMoeError, NativeAbort, NativeError, UsageError
from ..gguf.checks import check_runnable
from ..gguf.model import Model, open_model
from ..moe.prefetch import PrefetchTrial
from ..moe.throttle import Throttle
from ..moe.ways import WayChooser
from ..native.aborts import guarded
from ..native.devices import Backend, Device, find_device
from ..native.disk import DiskExecutor
from ..native.executor import Executor
from ..native.interposer import interposer
from ..native.llama import ContextPlan, LlamaContext, LlamaModel, Sampler, Sampling
from ..native.rpc import connecting, limit_silence
from .disk import DiskTier
from .residency import MAX_QUEUED, ResidencyEngine, Uploads
from .setup import SessionOptions, Setup, prepare
from .tape import RoutingTape
from .template import Message, render_chat
from .text import TextStream

log = logging.getLogger(__name__)

DEFAULT_PREFETCH_DEPTH = 2  # what `auto` tries


@dataclass(frozen=True, slots=True)
class Timings:
    """What the last answer took. Rates are tokens per second, None where nothing was measured.

    The first token of an answer comes out of the prefill: it took no decoding, and is not in the rate.
    """

    prompt_tokens: int
    reused_tokens: int
    prefill_s: float
    answer_tokens: int
    decode_s: float

    @property
    def prefill_rate(self) -> float | None:
        return self.prompt_tokens / self.prefill_s if self.prompt_tokens and self.prefill_s > 0 else None

    @property
    def decode_rate(self) -> float | None:
        decoded = self.answer_tokens - 1
        return decoded / self.decode_s if decoded > 0 and self.decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class SlotUse:
    """One slot device: its name, resident experts, and the bytes that slots and work space take there."""

    device: str
    n_resident: int
    slot_bytes: int
    work_bytes: int


class Session:
    """A model, ready to answer. Use it in a ``with`` block, or call ``close``.

    ``model`` is a path or an opened model. ``on_progress`` is called with the share loaded, 0 to 1.
    Raises: GgufMoeError with the reason and the next step, for a file that cannot run, a budget that is too
    small, a device or server that is not there, or a failure in llama.cpp.
    """

    def __init__(
        self,
        model: Model | str | Path,
        options: SessionOptions | None = None,
        *,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.model = model if isinstance(model, Model) else open_model(model)
        self.options = options or SessionOptions()
        check_runnable(self.model)
        self.setup: Setup = prepare(self.model, self.options)
        self.tokens: list[int] = []  # what the KV cache holds
        self.timings: Timings | None = None
        self._closers: list[Callable[[], None]] = []
        self._lost = False  # after an abort of ggml nothing may be freed: its locks may be held for ever
        try:
            self._load(on_progress)
        except BaseException as error:
            self._lost = isinstance(error, NativeAbort)
            self.close()
            if isinstance(error, NativeAbort):
                raise self._naming_servers(error) from error
            raise

    def _load(self, on_progress: Callable[[float], None] | None) -> None:
        setup, options = self.setup, self.options
        # The slot backends come first: with an RPC server, they keep the one connection that all of us use.
        with connecting(*options.rpc_endpoints):
            self._devices = [self._open(device) for device in setup.slot_devices]
        for endpoint in options.rpc_endpoints:
            limit_silence(endpoint)
        self.disk = DiskTier(self.model, setup.ram) if setup.ram is not None else None
        if self.disk is not None:
            self._closers.append(self.disk.close)
        with self.disk.loading() if self.disk is not None else nullcontext():
            self.llama = LlamaModel(
                self.model.paths[0], setup.load, on_progress, offset=self.model.stock_offset
            )
        self._closers.append(self.llama.close)
        self.engine = ResidencyEngine(self.model, setup.placement, self._devices)
        cpu, residents = self._open(find_device("cpu")), self.engine.residents
        self.executor: Executor
        if self.disk is not None:
            self._closers.append(self.disk.close)  # before the model, whose memory it reads into
            self.executor = DiskExecutor(cpu, residents, self.disk.by_key)
        else:
            self.executor = Executor(cpu, self._devices, residents, WayChooser())
        self.executor.batches.way = options.prefill
        self._closers.append(self.executor.close)
        plan = ContextPlan(
            n_ctx=setup.n_ctx,
            n_threads=setup.n_threads,
            n_batch=min(options.n_batch, max(setup.n_ctx, 1)),
            n_ubatch=min(options.n_ubatch, max(setup.n_ctx, 1)),
            n_seq_max=options.n_seq_max,
        )
        with interposer().attach(self.executor):
            self.context = LlamaContext(self.llama, plan)
        self._closers.append(self.context.close)
        # in the reverse order of closing: the engine's thread must end before anything it reads is freed
        self._closers.append(self.engine.close)
        if self.disk is not None:
            self.disk.start(self.executor.weights)
        weights = None if setup.load.repack else self.executor.weights
        guarded(self.engine.fill, weights)
        if options.routing_from is not None:
            self.engine.tape = RoutingTape(options.routing_from, self.model)
            self.executor.tape = self.engine.tape.chosen
        if options.trace or (options.policy != "static" and self._devices):
            uploads = Uploads(Throttle(MAX_QUEUED, options.upload_share), options.before_upload)
            self.engine.start(options.policy, uploads, options.trace, foreseen=options.prefetch_depth != 0)
            if options.prefetch_depth != 0:
                trial = PrefetchTrial() if options.prefetch_depth is None else None
                self.engine.prefetch(options.prefetch_depth or DEFAULT_PREFETCH_DEPTH, trial)
                self.executor.foreseer = self.engine.prefetcher

    def _open(self, device: Device) -> Backend:
        backend = Backend(device, n_threads=self.setup.n_threads)
        self._closers.append(backend.close)
        return backend

    # Evaluating -------------------------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], *, all_logits: bool = False) -> NDArray[np.float32]:
        """Append ``tokens`` to what the KV cache holds.

        Returns: the logits after the last token ``(n_vocab,)``, or after each of them ``(n, n_vocab)``.
        Raises: UsageError if they do not fit the context; NativeError if llama.cpp fails.
        """
        self._check_room(len(tokens))
        rows = []
        size = self.context.plan.n_batch
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            self._decode(part, all_logits)
            if all_logits:
                rows += [self.context.logits(row).copy() for row in range(len(part))]
        return np.stack(rows) if all_logits else self.context.logits()

    def _decode(self, tokens: Sequence[int], all_logits: bool = False) -> None:
        self.engine.begin_step(is_prefill=not self.executor.decoding)
        try:
            self.context.decode(tokens, len(self.tokens), all_logits=all_logits)
        except NativeAbort as error:
            self._lost = True
            raise self._naming_servers(error) from error
        except NativeError as error:
            self.reset()  # how much of the batch the cache holds is unknown
            cause, self.executor.error = self.executor.error, None
            if cause is None or isinstance(cause, GgufMoeError):
                raise cause or error from None
            raise NativeError(f"Computing the experts failed: {cause!r}") from cause
        except KeyboardInterrupt:  # the call came to its end before it was raised
            self.tokens = [*self.tokens, *tokens][: self.context.n_evaluated]
            raise
        self.tokens += tokens

    def _naming_servers(self, error: NativeAbort) -> NativeAbort:
        """An abort that can come from a server that was lost, with the address in front."""
        servers = ", ".join(self.options.rpc_endpoints)
        if not servers or servers in str(error):
            return error
        return NativeAbort(f"{servers}: the RPC server was lost. {error}", hint=error.hint)

    def _check_room(self, n_tokens: int) -> None:
        if len(self.tokens) + n_tokens > self.setup.n_ctx:
            raise UsageError(
                f"The text has {len(self.tokens) + n_tokens} tokens, the context holds {self.setup.n_ctx}.",
                hint="Use a larger --context, or a shorter text.",
            )

    def reset(self) -> None:
        """Forget everything that was evaluated."""
        self.context.clear()
        self.tokens = []

    def _keep_prefix(self, tokens: Sequence[int]) -> int:
        """Keep of the KV cache what ``tokens`` begins with, at most all but its last token.

        Returns: how many tokens need no evaluation. None are kept where the architecture cannot forget a part.
        """
        same = 0
        for mine, wanted in zip(self.tokens, tokens[:-1], strict=False):
            if mine != wanted:
                break
            same += 1
        if same < len(self.tokens) and not (same and self.context.truncate(same)):
            self.reset()
            return 0
        self.tokens = self.tokens[:same]
        return same

    # Answering --------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``, with the tokens that the model begins a text with.

        Raises: UsageError if the model has no tokenizer, or the text is empty and the model begins with nothing.
        """
        if not self.llama.has_tokenizer:
            raise UsageError(
                f"{self.model.paths[0]}: this model has no tokenizer, so it cannot read text.",
                hint="`ggufmoe verify` works on such models.",
            )
        tokens = self.llama.tokenize(text, parse_special=parse_special)
        if not tokens and self.llama.bos >= 0:
            tokens = [self.llama.bos]
        if not tokens:
            raise UsageError("The prompt is empty, and this model has no token to begin a text with.")
        return tokens

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        parse_special: bool = False,
    ) -> Iterator[str]:
        """Stream what the model goes on with after ``prompt``; ``timings`` are set when it ends.

        ``max_tokens`` -1 goes on until the model ends its answer or the context is full. What the KV cache
        already holds of the prompt is not evaluated again. Closing the iterator stops the answer.
        Raises: UsageError if the prompt does not fit the context.
        """
        tokens = (
            self.tokenize(prompt, parse_special=parse_special) if isinstance(prompt, str) else list(prompt)
        )
        if len(tokens) > self.setup.n_ctx:
            raise UsageError(
                f"The prompt has {len(tokens)} tokens, the context holds {self.setup.n_ctx}.",
                hint="Use a larger --context, or a shorter prompt.",
            )
        return self._generate(tokens, sampling or Sampling(), max_tokens, stop)

    def _generate(
        self, tokens: list[int], sampling: Sampling, max_tokens: int, stop: Sequence[str]
    ) -> Iterator[str]:
        sampler, text = Sampler(sampling), TextStream(stop)
        started = time.perf_counter()
        answered, decode_s, prefill_s, reused = 0, 0.0, 0.0, 0
        try:
            reused = self._keep_prefix(tokens)
            self.executor.decoding = False
            self.evaluate(tokens[reused:])
            prefill_s = time.perf_counter() - started
            self.executor.decoding = True
            while answered != max_tokens and not text.stopped:
                token = sampler.sample(self.context)
                if self.llama.is_end(token):
                    break
                answered += 1
                yield text.feed(self.llama.piece(token))
                if answered == max_tokens or text.stopped or len(self.tokens) >= self.setup.n_ctx:
                    break
                decode_started = time.perf_counter()
                self._decode([token])
                step_s = time.perf_counter() - decode_started
                decode_s += step_s
                self.engine.stepped(step_s, self.executor.traffic.decode_hits)
            yield text.finish()
        finally:
            sampler.close()
            self.timings = Timings(len(tokens) - reused, reused, prefill_s, answered, decode_s)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Stream the model's answer to a conversation, by its own chat template.

        A model without a template goes on with the text of the messages, a line break between them.
        Raises: FormatError if the template cannot be used; UsageError if the conversation does not fit.
        """
        template = self.llama.chat_template
        if template is None:
            text = "\n".join(message["content"] for message in messages)
            return self.generate(text, sampling, max_tokens=max_tokens, stop=stop)
        bos, eos = (
            self.llama.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
            for token in (self.llama.bos, self.llama.eos)
        )
        text = render_chat(template, messages, bos=bos, eos=eos)
        if self.llama.adds_bos and bos:
            text = text.removeprefix(bos)  # the tokenizer adds it: exactly one
        return self.generate(text, sampling, max_tokens=max_tokens, stop=stop, parse_special=True)

    # What happened ----------------------------------------------------------------------------------------

    @property
    def hit_rate(self) -> float | None:
        """Share of the routings of decoding that a slot answered; None before anything was decoded."""
        traffic = self.executor.traffic
        return traffic.decode_hits / traffic.decode if traffic.decode else None

    def slot_use(self) -> list[SlotUse]:
        """What each slot device holds."""
        work = self.executor.device_bytes
        uses = []
        if self.disk is not None:
            uses.append(SlotUse("RAM", self.disk.pool.n_present, self.disk.pool.used_bytes, 0))
        for index, backend in enumerate(self._devices):
            slots = [r.slots[index] for r in self.executor.banks.values() if index in r.slots]
            uses.append(
                SlotUse(
                    backend.device.name,
                    sum(s.n_slots for s in slots),
                    sum(s.n_bytes for s in slots),
                    work[index],
                )
            )
        return uses

    def close(self) -> None:
        """Free everything, in the reverse order of its making. Safe to call twice."""
        while self._closers:
            closer = self._closers.pop()
            if not self._lost:
                closer()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
