"""Run big Mixture-of-Experts GGUF models on small GPUs, every expert placed on its own, by an unpatched llama.cpp.

>>> from ggufmoe import Sampling, Session, SessionOptions, parse_residents
>>> with Session("model.gguf", SessionOptions(residents=parse_residents("25%"))) as session:
...     for piece in session.generate("Once upon a time", Sampling(temperature=0), max_tokens=64):
...         print(piece, end="", flush=True)

Names are loaded when they are first used: importing the package opens no library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        FormatError,
        GgufMoeError,
        MemoryPlanError,
        NativeAbort,
        NativeError,
        UsageError,
    )
    from .gguf.model import Model, open_model
    from .moe.residents import ResidentRequest, parse_residents
    from .moe.rules import Rule, parse_rule
    from .moe.sizes import ModelSizes, model_sizes
    from .native.devices import Device, list_devices
    from .native.llama import Sampling
    from .native.rpc import add_rpc_server
    from .run.session import Session, SlotUse, Timings
    from .run.setup import SessionOptions
    from .run.template import Message
    from .run.verify import Comparison, verify

__version__ = "0.1.0"

_MODULES = {
    "errors": ("FormatError", "GgufMoeError", "MemoryPlanError", "NativeAbort", "NativeError", "UsageError"),
    "gguf.model": ("Model", "open_model"),
    "moe.residents": ("ResidentRequest", "parse_residents"),
    "moe.rules": ("Rule", "parse_rule"),
    "moe.sizes": ("ModelSizes", "model_sizes"),
    "native.devices": ("Device", "list_devices"),
    "native.llama": ("Sampling",),
    "native.rpc": ("add_rpc_server",),
    "run.session": ("Session", "SlotUse", "Timings"),
    "run.setup": ("SessionOptions",),
    "run.template": ("Message",),
    "run.verify": ("Comparison", "verify"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Comparison",
    "Device",
    "FormatError",
    "GgufMoeError",
    "MemoryPlanError",
    "Message",
    "Model",
    "ModelSizes",
    "NativeAbort",
    "NativeError",
    "ResidentRequest",
    "Rule",
    "Sampling",
    "Session",
    "SessionOptions",
    "SlotUse",
    "Timings",
    "UsageError",
    "add_rpc_server",
    "list_devices",
    "model_sizes",
    "open_model",
    "parse_residents",
    "parse_rule",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
