"""Records the routing of a session in a trace file (``docs/trace.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from ..gguf.experts import BankKey, ExpertBank
from ..gguf.model import Model
from ..moe.sizes import model_sizes
from ..moe.trace import TraceBank, TraceHeader, TraceStep, TraceWriter
from ..native.residents import Residents


class Recorder:
    """Writes one line per step and bank, with original expert numbers. The file appears when it is closed."""

    def __init__(
        self,
        path: Path,
        model: Model,
        banks: Sequence[ExpertBank],
        residents: Mapping[BankKey, Residents],
        policy: str | None,
        max_pending: int,
    ) -> None:
        """``policy`` None: the trace holds the routing alone. Raises: UsageError if the file cannot be written."""
        self.step = 0
        self.is_prefill = True
        self._path, self._part = path, path.with_name(f".{path.name}.part")
        self._max_pending = max_pending
        try:
            self._file = self._part.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
        used = {layer.layer: layer.n_used for layer in model_sizes(model).layers}
        recorded = [_bank(bank, residents[bank.layer, bank.name], used.get(bank.layer, 0)) for bank in banks]
        header = TraceHeader(
            model=model.name,
            arch=model.architecture,
            n_layer=model.get("block_count", 0),
            banks=tuple(recorded),
            policy=policy,
            max_pending=max_pending,
        )
        self._writer = TraceWriter(self._file, header)

    def write(
        self,
        bank: ExpertBank,
        tokens: Sequence[Sequence[int]],
        committed: Sequence[int],
        abandoned: Sequence[int],
        max_pending: int,
        hits: int,
    ) -> None:
        """One step of one bank; all experts by their position in the file."""
        original = bank.original
        step = TraceStep(
            step=self.step,
            is_prefill=self.is_prefill,
            layer=bank.layer,
            bank=bank.name,
            tokens=tuple(tuple(original(expert) for expert in token) for token in tokens),
            committed=tuple(original(expert) for expert in committed),
            abandoned=tuple(original(expert) for expert in abandoned),
            max_pending=None if max_pending == self._max_pending else max_pending,
            hits=hits,
        )
        self._writer.write(step)

    def close(self) -> None:
        self._file.close()
        self._part.replace(self._path)


def _bank(bank: ExpertBank, residents: Residents, n_used: int) -> TraceBank:
    chosen = [bank.original(expert) for expert, place in enumerate(residents.places) if place >= 0]
    return TraceBank(
        layer=bank.layer,
        bank=bank.name,
        n_expert=bank.n_expert,
        n_used=n_used,
        expert_bytes=bank.slot_bytes,
        n_slots=sum(slots.n_slots for slots in residents.slots.values()),
        residents=tuple(chosen),
    )
