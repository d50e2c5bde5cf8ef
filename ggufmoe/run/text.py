"""From token bytes to text as it may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text. A character may begin in one token and end in another, and so may a
    stop string: what could still become one is held back."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = [text for text in stop if text]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """The text that is certain now. After a stop string was found ``stopped`` is true and nothing follows."""
        if self.stopped:
            return ""
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back. An unfinished character at the end shows as U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True)) + ("" if self.stopped else self._held)
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        self._held += text
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)  # the first to be complete: any other choice would depend on the pieces
            text, self._held = self._held[:start], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
