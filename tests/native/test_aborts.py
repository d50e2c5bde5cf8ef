"""ggml ends the process by design; under ``guarded`` it must not, and elsewhere it must end in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import rewrite, write_tiny_model

from ggufmoe.errors import NativeAbort
from ggufmoe.native import aborts
from ggufmoe.native import declarations as c
from ggufmoe.native.aborts import guarded
from ggufmoe.native.library import ggml
from ggufmoe.native.llama import LlamaModel, LoadPlan


def multiply_mismatching() -> None:
    """Experts of 32 inputs, an input row of 64: ggml asserts."""
    functions = ggml()
    context = functions.ggml_init(c.ggml_init_params(mem_size=1 << 20, mem_buffer=None, no_alloc=True))
    experts = functions.ggml_new_tensor_3d(context, c.GGML_TYPE_F32, 32, 4, 2)
    x = functions.ggml_new_tensor_3d(context, c.GGML_TYPE_F32, 64, 1, 1)
    ids = functions.ggml_new_tensor_3d(context, c.GGML_TYPE_I32, 1, 1, 1)
    functions.ggml_mul_mat_id(context, experts, x, ids)


def run_python(code: str, *, timeout: float = 20) -> subprocess.CompletedProcess[str]:
    """A program of its own that imports this module."""
    path = [os.fspath(Path(__file__).parent), *sys.path]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def ctrl_c_soon() -> Iterator[float]:
    """SIGINT comes a moment from now. The value is how long a call must take to see it: a bit more."""
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    yield 0.3
    timer.join()


# In this process -----------------------------------------------------------------------------------------


def test_an_abort_is_an_error_with_ggmls_words() -> None:
    with pytest.raises(
        NativeAbort, match=r"^llama\.cpp stopped: GGML_ASSERT\(.+\) failed \(ggml\.c:\d+\)$"
    ) as raised:
        guarded(multiply_mismatching)
    assert raised.value.hint is not None and "report" in raised.value.hint


def test_calls_after_an_abort_work_as_before(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(NativeAbort):
            guarded(multiply_mismatching)
        assert guarded(ggml().ggml_version).decode()
    model = LlamaModel(write_tiny_model(tmp_path / "m.gguf", "olmoe"), LoadPlan())
    assert model.n_vocab == 128
    model.close()


def test_a_model_that_llama_cpp_asserts_on_is_an_error(tmp_path: Path) -> None:
    good = write_tiny_model(tmp_path / "good.gguf", "qwen3moe")
    bad = rewrite(good, tmp_path / "bad.gguf", keys={"qwen3moe.expert_used_count": 9})
    with pytest.raises(NativeAbort, match="GGML_ASSERT"):
        LlamaModel(bad, LoadPlan())
    LlamaModel(good, LoadPlan()).close()


def test_results_and_exceptions_come_through() -> None:
    assert guarded(divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        guarded(divmod, 17, 0)
    with pytest.raises(SystemExit):
        guarded(sys.exit, 3)


def test_all_calls_run_in_one_thread_and_may_be_nested() -> None:
    first = guarded(threading.get_ident)
    assert first == guarded(guarded, threading.get_ident) == guarded(threading.get_ident)
    assert first != threading.get_ident()


def test_callers_in_several_threads_get_their_own_results() -> None:
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        results[number] = [guarded(int, f"{number}{i:03}") for i in range(200)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number * 1000 + i for i in range(200)] for number in range(1, 5)}


def test_an_abort_in_a_thread_of_ggmls_own_ends_the_waiting_call() -> None:
    """As when the thread that talks to an RPC server gives up: another thread than the caller's aborts."""

    def wait_for_other() -> None:
        thread = threading.Thread(
            target=aborts.on_abort, args=(b"/build/transport.cpp:93: lost",), daemon=True
        )
        thread.start()
        thread.join()

    with pytest.raises(NativeAbort, match=r"^llama\.cpp stopped: lost \(transport\.cpp:93\)$"):
        guarded(wait_for_other)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"/a/b c/ggml.c:12: it broke: badly\n", "it broke: badly (ggml.c:12)"),
        (b"no place at all", "no place at all"),
        (b"fatal error: no place", "fatal error: no place"),
        (b"/a/x.cpp:1: \xff\xfe", "\ufffd\ufffd (x.cpp:1)"),
        (None, "unknown reason"),
    ],
)
def test_the_message_names_the_file_without_its_folders(raw: bytes | None, text: str) -> None:
    def abort() -> None:
        aborts.on_abort(raw)

    with pytest.raises(NativeAbort) as raised:
        guarded(abort)
    assert str(raised.value) == f"llama.cpp stopped: {text}"


# Ctrl-C --------------------------------------------------------------------------------------------------


def test_ctrl_c_is_raised_when_the_call_has_returned(ctrl_c_soon: float) -> None:
    finished = []

    def slow() -> None:
        time.sleep(ctrl_c_soon)
        finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        guarded(slow)
    assert finished
    assert guarded(int, 7) == 7


def test_an_error_of_the_interrupted_call_is_not_hidden(ctrl_c_soon: float) -> None:
    def slow() -> None:
        time.sleep(ctrl_c_soon)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        guarded(slow)


def test_an_abort_of_the_interrupted_call_is_not_hidden(ctrl_c_soon: float) -> None:
    def slow() -> None:
        time.sleep(ctrl_c_soon)
        multiply_mismatching()

    with pytest.raises(NativeAbort):
        guarded(slow)


def test_no_result_is_lost_whenever_ctrl_c_comes() -> None:
    """A burst of interrupts over many short calls: every call runs exactly once, and none waits for ever."""
    result = run_python("""
        import os, signal, threading, time
        from ggufmoe.native.aborts import guarded

        done = begun = interrupts = 0

        def call():
            global done
            done += 1

        def press():
            end = time.monotonic() + 2
            while time.monotonic() < end:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.0007)

        guarded(int)
        presser = threading.Thread(target=press)
        armed = False

        def on_interrupt(*_):
            global armed
            if armed:
                armed = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, on_interrupt)
        presser.start()
        while presser.is_alive():
            try:
                armed = True
                guarded(call)
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
            begun += 1
            guarded(int)  # not interrupted: all calls before it have ended
            assert done in (begun, begun - 1), (done, begun)
            done = begun
        print("interrupts" if interrupts > 100 else f"only {interrupts}")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupts\n", "")


# Programs of their own -----------------------------------------------------------------------------------


def test_an_abort_outside_guarded_is_one_line_and_exit_1() -> None:
    result = run_python("import test_aborts; test_aborts.multiply_mismatching(); print('went on')")
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: llama.cpp stopped: ") and "GGML_ASSERT" in line


def test_a_process_ends_normally_after_an_abort() -> None:
    started = time.monotonic()
    result = run_python("""
        from test_aborts import NativeAbort, guarded, multiply_mismatching
        try:
            guarded(multiply_mismatching)
        except NativeAbort:
            print("caught")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "caught\n", "")
    assert time.monotonic() - started < 10


def test_an_abort_nobody_catches_is_a_traceback_and_exit_1() -> None:
    result = run_python("from test_aborts import *; guarded(multiply_mismatching)")
    assert result.returncode == 1
    assert "ggufmoe.errors.NativeAbort: llama.cpp stopped: " in result.stderr
