"""The residency engine: experts move into slots as the routing says, in the background.

After the router of a layer has chosen, the bank's policy may admit a newcomer in place of a victim. The victim
is cold from that moment, so no later step reads its slot, and no running one does: a policy never takes an
expert of the running step, and every step waits for its devices before it ends. A thread uploads the
newcomer; only when that is complete, at the bank's next turn, a step sees it as resident. Until then the CPU
computes it where it lies. So uploads are never waited for, and change no result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ..gguf.experts import BankKey, ExpertBank, expert_span
from ..gguf.model import Model
from ..moe.policies import POLICIES, Admission, Policy
from ..moe.prefetch import PrefetchTrial
from ..moe.residents import Placement
from ..moe.throttle import Throttle
from ..native.devices import Backend, type_numbers
from ..native.mapped import MappedFile
from ..native.residents import Residents, Sources, place_of
from ..native.slots import Slots, StackShape
from .prefetch import Prefetcher
from .recorder import Recorder
from .tape import RoutingTape

log = logging.getLogger(__name__)

# Uploads that may wait: enough to keep the link busy, few enough that they are still wanted when they come.
MAX_QUEUED = 16
MAX_PENDING_PER_BANK = 4


class Mover:
    """Moves the experts of one bank. All but ``done`` belongs to the thread that computes."""

    def __init__(
        self,
        residents: Residents,
        policy: Policy,
        free: Sequence[int],
        uploads: Uploads,
        record: Callable[..., None] | None = None,
    ) -> None:
        """``free`` are the places that no resident takes. ``record`` is told of every step (``Recorder.write``)."""
        self.policy = policy
        self.done: deque[tuple[int, int, bool]] = deque()  # expert, place, whether it is there
        self._residents, self._free, self._uploads, self._record = residents, list(free), uploads, record
        self._ended: tuple[list[int], list[int]] = ([], [])  # committed and abandoned since the last step

    def arrive(self) -> None:
        """Let steps see what was uploaded since the last turn."""
        while self.done:
            expert, place, is_there = self.done.popleft()
            if is_there:
                self.policy.commit(expert)
                self._residents.show(expert, place)
            else:
                self.policy.abandon(expert)
                self._free.append(place)
            if self._record is not None:
                self._ended[0 if is_there else 1].append(expert)

    def route(self, chosen: Sequence[int]) -> None:
        """The router chose these distinct experts for one token."""
        self._limit()
        if self._record is not None:
            self._note((chosen,))
        admissions = self.policy.route(chosen)
        if admissions:
            self._start(admissions)

    def route_batch(self, ids: NDArray[np.int32]) -> None:
        """The router's choice for several tokens, ``(n_tokens, k)``."""
        self._limit()
        if self._record is not None:
            self._note(ids.tolist())
        self._start(self.policy.route_batch(ids))

    def foresee(self, experts: Sequence[int]) -> list[int]:
        """These experts will probably be chosen next. Returns: those whose upload was started."""
        self._limit()
        admissions = self.policy.foresee(experts)
        self._start(admissions)
        return [expert for expert, _ in admissions]

    def _note(self, tokens: Sequence[Sequence[int]]) -> None:
        """Record a step before it is decided."""
        assert self._record is not None
        residents = self.policy.residents
        hits = sum(expert in residents for token in tokens for expert in token)
        self._record(tokens, *self._ended, self.policy.max_pending, hits)
        self._ended = ([], [])

    def _limit(self) -> None:
        """Tell the policy how many uploads it may have under way."""
        uploads, policy = self._uploads, self.policy
        room = len(self._free) or uploads.throttle.room(uploads.n_queued)
        policy.max_pending = min(MAX_PENDING_PER_BANK, len(policy.pending) + room)

    def _start(self, admissions: Sequence[Admission]) -> None:
        for expert, victim in admissions:
            place = self._free.pop() if victim is None else self._residents.hide(victim)
            self._uploads.put(self, expert, place)

    def computed_cold(self, seconds: float, n_pairs: int) -> None:
        self._uploads.throttle.computed_cold(seconds, n_pairs)

    def upload(self, expert: int, place: int) -> None:
        """Copy an expert to its place; the uploading thread calls this."""
        assert self._residents.sources is not None
        self._residents.fill(place, self._residents.sources(expert))


class Uploads:
    """The thread that uploads, one expert at a time, in the order of admission."""

    def __init__(self, throttle: Throttle, before_upload: Callable[[int], None] | None = None) -> None:
        """``before_upload`` is called with every expert in the thread; tests delay and break uploads by it."""
        self.throttle = throttle
        self.n_started = 0  # written by the thread that computes
        self.n_ended = 0  # written by the thread that uploads, as all that follows
        self.n_uploaded = 0
        self.busy_s = 0.0
        self.error: Exception | None = None
        self._before_upload = before_upload
        self._queue: SimpleQueue[tuple[Mover, int, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ggufmoe-uploads", daemon=True)
        self._thread.start()

    @property
    def n_queued(self) -> int:
        """Uploads that wait or are under way."""
        return self.n_started - self.n_ended

    def put(self, mover: Mover, expert: int, place: int) -> None:
        self.n_started += 1
        self._queue.put((mover, expert, place))

    def wait(self, seconds: float = 60.0) -> bool:
        """Wait until nothing is queued. Returns: whether that came true in time."""
        until = time.monotonic() + seconds
        while self.n_queued and time.monotonic() < until:
            time.sleep(0.001)
        return not self.n_queued

    def close(self) -> None:
        """End the thread after the upload it is at; what waits is dropped."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            mover, expert, place = job
            started = time.perf_counter()
            is_there = self.error is None and self._upload(mover, expert, place)
            seconds = time.perf_counter() - started
            if is_there:
                self.busy_s += seconds
                self.n_uploaded += 1
                self.throttle.uploaded(seconds)
            mover.done.append((expert, place, is_there))
            self.n_ended += 1

    def _upload(self, mover: Mover, expert: int, place: int) -> bool:
        try:
            if self._before_upload is not None:
                self._before_upload(expert)
            mover.upload(expert, place)
            return True
        except Exception as error:
            self.error = error
            log.warning(
                "Uploading experts failed (%s); the session goes on with those that are there.", error
            )
            return False


class ResidencyEngine:
    """The slots of a session, their first residents, and whoever moves in later.

    ``residents`` are given to the executor when it is made; ``fill`` makes the slots once the model is loaded.
    """

    def __init__(self, model: Model, placement: Placement, devices: Sequence[Backend]) -> None:
        self.residents: dict[BankKey, Residents] = {
            (bank.layer, bank.name): Residents(bank.n_expert, shapes=stack_shapes(bank))
            for bank in model.banks
        }
        self.movers: dict[BankKey, Mover] = {}
        self.uploads: Uploads | None = None
        self.recorder: Recorder | None = None
        self.prefetcher: Prefetcher | None = None
        self.tape: RoutingTape | None = None
        self._model, self._placement, self._devices = model, placement, devices
        # GroveMoE's chunk experts follow from the routed ones, several to one: they stay where they are
        self._moving = [bank for bank in model.banks if bank.name == "exps"]
        self._files: list[MappedFile] = []
        self._last_hits = 0

    def fill(self, weights: Mapping[str, int] | None) -> None:
        """Make the slots and upload the first residents.

        ``weights`` are the addresses of llama.cpp's own expert matrices. None: they are repacked there, so the
        experts are taken from the model file.
        """
        if weights is None:
            self._files = [MappedFile(path) for path in self._model.paths]
        for bank in self._model.banks:
            residents = self.residents[bank.layer, bank.name]
            members = self._placement.residents[bank.layer, bank.name]
            residents.sources = sources = self._sources(bank, weights)
            for index, device in enumerate(self._devices):
                experts = [bank.position(expert) for expert, place in members if place == index]
                if not experts:
                    continue
                residents.slots[index] = Slots(device, residents.shapes, len(experts))
                started = time.perf_counter()
                for slot, expert in enumerate(experts):
                    residents.put(expert, index, slot, sources(expert))
                residents.upload_s = (time.perf_counter() - started) / len(experts)

    def start(
        self, policy: str, uploads: Uploads, trace: Path | None = None, *, foreseen: bool = False
    ) -> None:
        """Let ``policy`` decide from now on who is resident; ``uploads`` does the copying.

        With ``trace``, all routing is recorded in that file, that of banks without slots too. Where experts are
        ``foreseen``, the trace holds the routing alone: what the engine did cannot be replayed from it.
        """
        self.uploads = uploads
        if trace is not None:
            self.recorder = Recorder(
                trace,
                self._model,
                self._moving,
                self.residents,
                None if foreseen else policy,
                MAX_PENDING_PER_BANK,
            )
        for bank in self._moving:
            residents = self.residents[bank.layer, bank.name]
            n_slots = sum(slots.n_slots for slots in residents.slots.values())
            if not 0 < n_slots < bank.n_expert and self.recorder is None:
                continue  # nobody can move
            chosen = [expert for expert, place in enumerate(residents.places) if place >= 0]
            decider = POLICIES[policy](bank.n_expert, n_slots, chosen, max_pending=MAX_PENDING_PER_BANK)
            taken = {residents.places[expert] for expert in chosen}
            free = [
                place
                for device, slots in residents.slots.items()
                for slot in range(slots.n_slots)
                if (place := place_of(device, slot)) not in taken
            ]
            record = partial(self.recorder.write, bank) if self.recorder is not None else None
            mover = Mover(residents, decider, free, uploads, record)
            residents.mover = self.movers[bank.layer, bank.name] = mover

    def prefetch(self, depth: int, trial: PrefetchTrial | None) -> None:
        """Ask the routers of ``depth`` later layers early; with ``trial``, only where that pays."""
        self.prefetcher = Prefetcher(self._model, self.movers, depth, trial)

    def begin_step(self, *, is_prefill: bool) -> None:
        """The next evaluation begins."""
        if self.tape is not None and not is_prefill:
            self.tape.step += 1
        if self.recorder is not None:
            self.recorder.step += 1
            self.recorder.is_prefill = is_prefill

    def stepped(self, seconds: float, hits: int) -> None:
        """A token was decoded; ``hits`` counts from the session's beginning."""
        if self.uploads is not None:
            self.uploads.throttle.stepped(seconds, hits - self._last_hits)
            self._last_hits = hits
        if self.prefetcher is not None and self.prefetcher.trial is not None:
            self.prefetcher.trial.stepped(seconds)

    def _sources(self, bank: ExpertBank, weights: Mapping[str, int] | None) -> Sources:
        """Where the bytes of an expert are, by its position in the file."""
        if weights is not None:
            bases = {name: weights.get(tensor.name, 0) for name, tensor in bank.weights.items()}
        else:
            bases = {
                name: self._files[tensor.shard].address(tensor.offset)
                for name, tensor in bank.weights.items()
            }
        sizes = {name: expert_span(tensor, 0).stop for name, tensor in bank.weights.items()}
        return lambda expert: {name: base + expert * sizes[name] for name, base in bases.items()}

    def close(self) -> None:
        if self.prefetcher is not None:
            self.prefetcher.close()
        if self.uploads is not None:
            self.uploads.close()
        if self.recorder is not None:
            self.recorder.close()
        for residents in self.residents.values():
            for slots in residents.slots.values():
                slots.close()
        for file in self._files:
            file.close()


def stack_shapes(bank: ExpertBank) -> dict[str, StackShape]:
    """The matrices of a bank as slots need them."""
    numbers = type_numbers()
    return {
        projection: StackShape(
            numbers[tensor.type_name], tensor.ne[0], tensor.ne[1], tensor.n_bytes // bank.n_expert
        )
        for projection, tensor in bank.weights.items()
    }
