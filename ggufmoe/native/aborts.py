"""ggml ends the process where others return an error. Here an abort becomes a Python exception instead.

``guarded`` runs a native call in one long-lived thread and waits for it. When ggml aborts anywhere meanwhile
(in that call, or in a thread of ggml's own, such as the one that talks to an RPC server), ggml's abort
callback parks the aborting thread for good and the waiting caller gets a NativeAbort. What the parked call
holds is lost: memory, locks, the session. The process lives, and can say so in one line.

One thread for all calls, since OpenMP keeps a team of worker threads for every thread that computes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from queue import SimpleQueue
from typing import Any, TypeVar

from ..errors import NativeAbort

T = TypeVar("T")


class _Call:
    """One native call on its way: what to run, and where its outcome is delivered."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.started = False
        self.outcome: tuple[Any, BaseException | None] | None = None
        self._delivered: SimpleQueue[None] = SimpleQueue()

    def deliver(self, result: Any, error: BaseException | None) -> None:
        if self.outcome is None:
            self.outcome = (result, error)
        self._delivered.put(None)

    def wait(self) -> None:
        self._delivered.get()


class _NativeThread:
    def __init__(self) -> None:
        self.calls: SimpleQueue[_Call] = SimpleQueue()
        self.current: _Call | None = None
        self.thread = threading.Thread(target=self._run, name="ggufmoe-native", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            call = self.calls.get()
            if call.started:
                continue
            call.started = True
            self.current = call
            try:
                call.deliver(call.function(*call.args), None)
            except BaseException as error:  # it belongs to the caller, whatever it is
                call.deliver(None, error)
            finally:
                self.current = None
                del call  # nor may its result live until the next call comes


_lock = threading.Lock()
_native: _NativeThread | None = None
past_aborts: list[str] = []  # ggml's messages, with the place in its source in front


def guarded(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)`` in the native thread; Ctrl-C is raised after the call has returned.

    Raises: NativeAbort if ggml aborts before the call returns; whatever ``function`` raises.
    """
    global _native
    with _lock:
        if _native is None:
            _native = _NativeThread()
        native = _native
    if threading.current_thread() is native.thread:
        return function(*args)
    call = _Call(function, args)
    interrupt: KeyboardInterrupt | None = None
    while call.outcome is None:
        # Ctrl-C can be raised between any two steps, so each may happen twice: a call in the queue runs once.
        try:
            native.calls.put(call)
            call.wait()
        except KeyboardInterrupt as pressed:
            interrupt = pressed
    result, error = call.outcome
    if error is not None:
        raise error
    if interrupt is not None:
        raise interrupt
    return result  # type: ignore[no-any-return]


def on_abort(message: bytes | None) -> None:
    """ggml's abort callback: if it returned, the process would end with SIGABRT."""
    global _native
    text = (message or b"unknown reason").decode("utf-8", "replace").strip()
    past_aborts.append(text)
    native = _native
    call = native.current if native is not None else None
    if call is None:
        # No one waits for an answer, so there is no one to tell but the user.
        print(f"Error: llama.cpp stopped: {text}", file=sys.stderr, flush=True)
        os._exit(1)
    with _lock:
        _native = None  # later calls get a fresh thread; this one never comes back
    call.deliver(None, NativeAbort(f"llama.cpp stopped: {_reason(text)}", hint=_hint(text)))
    while True:
        time.sleep(3600)


def _reason(text: str) -> str:
    """ggml's message without the source path in front: ``/build/ggml-rpc.cpp:93: reason``."""
    location, _, reason = text.partition(": ")
    return f"{reason} ({PurePath(location).name})" if reason and ":" in location else text


def _hint(text: str) -> str | None:
    if "RPC" in text:
        return "The RPC server died or stopped answering; restart it and run the command again."
    return "This is a fault in llama.cpp or in the model file; please report it with the command you ran."
