"""Every error that ggufmoe raises on purpose."""

from __future__ import annotations


class GgufMoeError(Exception):
    """Base of every error we raise on purpose. ``hint`` is the user's next step."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(GgufMoeError):
    """What the user asked for makes no sense, whatever the model (exit code 2)."""


class FormatError(GgufMoeError):
    """The file is not a GGUF file we can trust, or not one we can run."""


class MemoryPlanError(GgufMoeError):
    """The model does not fit the budget."""


class NativeError(GgufMoeError):
    """A llama.cpp or ggml call failed, or the library is not the pinned one."""


class NativeAbort(NativeError):
    """ggml wanted to end the process. What the call held is lost, and must not be freed."""
