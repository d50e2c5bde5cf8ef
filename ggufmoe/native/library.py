"""The one handle to llama.cpp: opened by llama-cpp-python, checked against the version we know, with ggml's
prototypes bound to it.

ggml's symbols are taken from llama_cpp's own handle. The wheel holds ``libggml*.so`` several times, and
opening one of them by path would load a second, unrelated device registry.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ..errors import NativeError
from . import aborts
from . import declarations as c

log = logging.getLogger(__name__)

SUPPORTED_LLAMA_CPP_PYTHON = "0.3.36"
SUPPORTED_GGML = "0.25.3"
INSTALL_HINT = (
    f'Install it with: CMAKE_ARGS="-DGGML_RPC=ON" pip install --no-cache-dir --force-reinstall '
    f'"llama-cpp-python=={SUPPORTED_LLAMA_CPP_PYTHON}"'
)


@functools.cache
def llama_cpp() -> ModuleType:
    """The module of llama.cpp's C functions (``llama_cpp.llama_cpp``), checked to be the pinned version.

    Raises: NativeError if it is absent, cannot be loaded, or is a version whose structures we do not know.
    """
    try:
        package = importlib.import_module("llama_cpp")
        module = importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        raise NativeError("llama-cpp-python is not installed.", hint=INSTALL_HINT) from error
    except (OSError, RuntimeError, AttributeError) as error:
        raise NativeError(f"llama.cpp's library cannot be loaded: {error}", hint=_load_hint(error)) from error
    version = getattr(package, "__version__", "unknown")
    if version != SUPPORTED_LLAMA_CPP_PYTHON:
        raise NativeError(
            f"llama-cpp-python {version} is installed; ggufmoe supports {SUPPORTED_LLAMA_CPP_PYTHON} only, "
            "because it builds on llama.cpp's internal structures.",
            hint=INSTALL_HINT,
        )
    return module


def _load_hint(error: Exception) -> str:
    if "libgomp" in str(error):
        return "Install the OpenMP runtime, for example: apt-get install libgomp1"
    if "musl" in str(error):
        return f"The wheel was built for another C library; build it on this machine. {INSTALL_HINT}"
    return INSTALL_HINT


@functools.cache
def ggml() -> Any:
    """ggml's C functions with their prototypes, as attributes.

    Raises: NativeError if the library lacks a function or is not the pinned ggml.
    """
    handle = llama_cpp()._lib
    functions = SimpleNamespace(has_rpc=_has(handle, c.RPC_PROTOTYPES))
    prototypes = {**c.PROTOTYPES, **(c.RPC_PROTOTYPES if functions.has_rpc else {})}
    for name, (result, arguments) in prototypes.items():
        try:
            # a function object of our own: llama_cpp may declare the same symbol with other types
            function = ctypes.CFUNCTYPE(result, *arguments)((name, handle))  # type: ignore[arg-type]
        except AttributeError as error:
            raise NativeError(f"llama.cpp's library lacks the function {name}.", hint=INSTALL_HINT) from error
        setattr(functions, name, function)
    version = functions.ggml_version().decode()
    if version != SUPPORTED_GGML:
        raise NativeError(
            f"llama.cpp's library holds ggml {version}; ggufmoe supports ggml {SUPPORTED_GGML} "
            f"(llama-cpp-python {SUPPORTED_LLAMA_CPP_PYTHON}) only.",
            hint=INSTALL_HINT,
        )
    _install_hooks(functions)
    llama_cpp().llama_backend_init()
    # A callback waits for the interpreter lock up to this long when another thread runs bytecode.
    sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
    return functions


def _has(handle: ctypes.CDLL, names: dict[str, Any]) -> bool:
    return all(hasattr(handle, name) for name in names)


def require_rpc() -> Any:
    """ggml's functions, or a NativeError when llama.cpp was built without its RPC backend."""
    functions = ggml()
    if not functions.has_rpc:
        raise NativeError("llama.cpp was built without its RPC backend.", hint=INSTALL_HINT)
    return functions


# llama.cpp's log ---------------------------------------------------------------------------------------

_complaints: deque[tuple[int, str]] = deque(maxlen=50)
_transcripts: list[list[bytes]] = []  # of those who read what llama.cpp says
_hooks: list[Any] = []  # callbacks must outlive every call of the library


def _on_log(level: int, text: int | bytes | None, _user_data: int | None) -> None:
    raw = ctypes.string_at(text) if isinstance(text, int) else text or b""
    for transcript in _transcripts:
        transcript.append(raw)
    line = raw.decode("utf-8", "replace").strip()
    if line and level in (c.GGML_LOG_LEVEL_WARN, c.GGML_LOG_LEVEL_ERROR):
        _complaints.append((level, line))
    log.debug("llama.cpp: %s", line)


@contextmanager
def collected_complaints() -> Iterator[Callable[[], str]]:
    """What llama.cpp warns of or calls an error inside the block; the yielded function names the cause.

    llama.cpp returns NULL and logs the reason. The first error that it logs is the most specific one; the
    name of the C function in front of it is cut off.
    """
    _complaints.clear()

    def cause() -> str:
        errors = [line for level, line in _complaints if level == c.GGML_LOG_LEVEL_ERROR]
        lines = errors or [line for _, line in _complaints] or ["no reason given"]
        function, _, reason = lines[0].partition(": ")
        return reason if reason and " " not in function else lines[0]

    yield cause


@contextmanager
def collected_log() -> Iterator[Callable[[], str]]:
    """All that llama.cpp logs inside the block, as it was put together; the yielded function returns it."""
    transcript: list[bytes] = []
    _transcripts.append(transcript)
    try:
        yield lambda: b"".join(transcript).decode("utf-8", "replace")
    finally:
        _transcripts.remove(transcript)


def _install_hooks(functions: Any) -> None:
    module = llama_cpp()
    on_log = module.llama_log_callback(_on_log)
    on_abort = c.abort_callback_t(aborts.on_abort)
    _hooks.extend([on_log, on_abort])
    module.llama_log_set(on_log, None)
    functions.ggml_set_abort_callback(on_abort)


def c_callback(prototype: Any, *, on_error: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a C function pointer that logs an exception and returns ``on_error`` instead.

    An exception in a ctypes callback would give C an undefined value; ``on_error`` is one that ggml already
    treats as failure, for example NULL from ``init_backend``.
    """

    def wrap(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception:
                log.exception("%s failed inside a ggml callback", function.__name__)
                return on_error

        return prototype(guarded)

    return wrap
