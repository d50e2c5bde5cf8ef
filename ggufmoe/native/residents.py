"""Where the experts of a bank are, and what was routed to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .slots import Slots, StackShape

COLD = -1
DEVICE_SHIFT = 20  # a place is device << 20 | slot
SLOT_MASK = (1 << DEVICE_SHIFT) - 1

Sources = Callable[[int], Mapping[str, int]]  # expert -> addresses of its matrices by projection


def place_of(device: int, slot: int) -> int:
    """A slot of a device as one number."""
    return device << DEVICE_SHIFT | slot


class Mover(Protocol):
    """Moves the experts of one bank between steps (``ggufmoe.run.residency``)."""

    done: deque[tuple[int, int, bool]]

    def arrive(self) -> None:
        """Let steps see what was uploaded since the last turn."""

    def route(self, chosen: Sequence[int]) -> None:
        """The router chose these distinct experts for one token; what is under way may still read them."""

    def route_batch(self, ids: NDArray[np.int32]) -> None:
        """The router's choice for several tokens, ``(n_tokens, k)``."""

    def computed_cold(self, seconds: float, n_pairs: int) -> None:
        """The CPU took this long for ``n_pairs`` cold pairs of one token."""


@dataclass
class Residents:
    """Where the experts of one bank are, and how often each was chosen.

    ``places[expert]`` is ``COLD`` or the place of its slot; ``place_array`` is the same for whole batches.
    Counts are routings by expert. ``shapes`` are its matrices, ``sources`` tells where the bytes of an expert are,
    ``upload_s`` how long one takes to upload (0: not known yet).
    """

    n_expert: int
    slots: dict[int, Slots] = field(default_factory=dict)
    mover: Mover | None = None
    shapes: Mapping[str, StackShape] = field(default_factory=dict)
    sources: Sources | None = None
    upload_s: float = 0.0

    def __post_init__(self) -> None:
        self.places = [COLD] * self.n_expert
        self.place_array = np.full(self.n_expert, COLD, np.int32)
        self.decode_counts = [0] * self.n_expert
        self.prefill_counts = np.zeros(self.n_expert, np.int64)
        self.shape_key = tuple(sorted(self.shapes.items()))  # equal for banks whose experts can share slots

    def put(self, expert: int, device: int, slot: int, sources: Mapping[str, int]) -> None:
        """Make ``expert`` resident: upload it, and only then let steps see it there."""
        place = place_of(device, slot)
        self.fill(place, sources)
        self.show(expert, place)

    def fill(self, place: int, sources: Mapping[str, int]) -> None:
        """Copy an expert to a place that no step can read now."""
        self.slots[place >> DEVICE_SHIFT].upload(place & SLOT_MASK, sources)

    def show(self, expert: int, place: int) -> None:
        """From the next step on, ``expert`` is resident at ``place``."""
        self.places[expert] = self.place_array[expert] = place

    def hide(self, expert: int) -> int:
        """From the next step on, ``expert`` is cold. Returns: the place that it leaves."""
        place = self.places[expert]
        self.places[expert] = self.place_array[expert] = COLD
        return place


@dataclass
class Traffic:
    """Routings answered from a slot, and all routings, in prefill and decode."""

    prefill_hits: int = 0
    prefill: int = 0
    decode_hits: int = 0
    decode: int = 0
