"""The handle to llama.cpp: pinned version, RPC, one device registry, callbacks that never raise, a readable log."""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import write_tiny_model

from ggufmoe.errors import NativeError
from ggufmoe.native import declarations as c
from ggufmoe.native import library
from ggufmoe.native.devices import OUR_DEVICE
from ggufmoe.native.interposer import interposer
from ggufmoe.native.llama import ContextPlan, LlamaContext, LlamaModel, LoadPlan

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

# Version gate --------------------------------------------------------------------------------------------


def load_again() -> Any:
    """Check the package again, as at the first call."""
    return library.llama_cpp.__wrapped__()


def bind_again() -> Any:
    """Bind and check ggml again, as at the first call."""
    return library.ggml.__wrapped__()


@pytest.mark.parametrize("version", ["0.3.37", "0.3.35", "0.3.36.post1", "1.0", None])
def test_another_llama_cpp_python_is_refused(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("llama_cpp")
    if version is None:
        monkeypatch.delattr(package, "__version__")
    else:
        monkeypatch.setattr(package, "__version__", version)
    with pytest.raises(
        NativeError, match=rf"{version or 'unknown'} is installed.* supports 0\.3\.36"
    ) as raised:
        load_again()
    assert raised.value.hint is not None and '"llama-cpp-python==0.3.36"' in raised.value.hint


def test_another_ggml_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SUPPORTED_GGML", "0.99.1")
    with pytest.raises(NativeError, match=r"holds ggml 0\.25\.3; ggufmoe supports ggml 0\.99\.1 .*0\.3\.36"):
        bind_again()


def test_a_lacking_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(c.PROTOTYPES, "ggml_frobnicate", (None, ()))
    with pytest.raises(NativeError, match="lacks the function ggml_frobnicate") as raised:
        bind_again()
    assert raised.value.hint == library.INSTALL_HINT


def test_a_build_without_rpc_is_refused_only_where_rpc_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(c.RPC_PROTOTYPES, "ggml_backend_rpc_frobnicate", (None, ()))
    functions = bind_again()
    assert not functions.has_rpc and not hasattr(functions, "ggml_backend_rpc_add_server")
    monkeypatch.setattr(library, "ggml", lambda: functions)
    with pytest.raises(NativeError, match="built without its RPC backend") as raised:
        library.require_rpc()
    assert raised.value.hint is not None and "-DGGML_RPC=ON" in raised.value.hint


def test_this_llama_cpp_has_rpc() -> None:
    """Not skipped where it is missing: a good part of the other tests would silently prove nothing."""
    if not library.ggml().has_rpc or not library.llama_cpp().llama_supports_rpc():
        pytest.fail(f"llama.cpp was built without its RPC backend. {library.INSTALL_HINT}")


# Packages that cannot be used, in programs of their own --------------------------------------------------

BROKEN = {
    "libgomp is missing": (
        'raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")',
        "libgomp1",
    ),
    "made for musl": (
        'raise OSError("libc.musl-x86_64.so.1: cannot open shared object file: No such file or directory")',
        "another C library",
    ),
    "a newer version": (
        '__version__ = "0.3.37"',
        "llama-cpp-python 0.3.37 is installed; ggufmoe supports 0.3.36",
    ),
    "a symbol is missing": (
        'raise AttributeError("libllama.so: undefined symbol: llama_model_quantize")',
        "undefined symbol: llama_model_quantize",
    ),
    "libraries are missing": (
        "raise FileNotFoundError(\"Shared library with base name 'llama' not found\")",
        "Shared library with base name 'llama' not found",
    ),
    "absent": (
        "raise ModuleNotFoundError(\"No module named 'llama_cpp'\")",
        "llama-cpp-python is not installed",
    ),
}


def command(*arguments: str, package: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.fspath(package), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "ggufmoe", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=20,
    )


def broken_package(folder: Path, code: str) -> Path:
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text(f"{code}\n", encoding="utf-8")
    (folder / "llama_cpp" / "llama_cpp.py").write_text("", encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", BROKEN)
def test_a_package_that_cannot_be_used_is_one_line(case: str, tmp_path: Path) -> None:
    code, says = BROKEN[case]
    result = command("devices", package=broken_package(tmp_path, code))
    assert (result.returncode, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ") and says in line


def test_the_error_is_json_where_json_was_asked_for(tmp_path: Path) -> None:
    code, says = BROKEN["libgomp is missing"]
    result = command("devices", "--json", package=broken_package(tmp_path, code))
    assert result.returncode == 1
    assert "libgomp.so.1" in json.loads(result.stdout)["error"]
    assert says in json.loads(result.stdout)["hint"]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"], ["inspect", "--help"]])
def test_help_needs_no_llama_cpp(arguments: list[str], tmp_path: Path) -> None:
    """Not even one that kills the process: a wheel for a newer CPU ends in an illegal instruction."""
    package = broken_package(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    result = command(*arguments, package=package)
    assert (result.returncode, result.stderr) == (0, "")
    assert "ggufmoe" in result.stdout


# One registry for everybody ------------------------------------------------------------------------------


def registry_as_llama_cpp_sees_it() -> list[str]:
    """The names of all devices, through the handle that llama-cpp-python itself opened."""
    handle = importlib.import_module("llama_cpp.llama_cpp")._lib
    count = ctypes.CFUNCTYPE(ctypes.c_size_t)(("ggml_backend_dev_count", handle))
    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("ggml_backend_dev_get", handle))
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("ggml_backend_dev_name", handle))
    return [name(get(i)).decode() for i in range(count())]


def test_our_device_is_in_llama_cpps_own_registry() -> None:
    interposer()
    assert registry_as_llama_cpp_sees_it().count(OUR_DEVICE) == 1
    interposer()
    assert registry_as_llama_cpp_sees_it().count(OUR_DEVICE) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ggml_is_loaded_once() -> None:
    """A second copy, opened by path, would have a registry of its own: nothing would ever call us."""
    interposer()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert len({line.split()[-1] for line in maps if "libggml-base" in line}) == 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen3moe")


@pytest.fixture
def model(tiny: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(tiny, LoadPlan())
    yield model
    model.close()


def stock_logits(model: LlamaModel) -> NDArray[np.float32]:
    """Prefill and two decoded tokens of a context that nobody attached anything to."""
    context = LlamaContext(model, ContextPlan(n_ctx=64, n_threads=1))
    try:
        context.decode(TOKENS, 0, all_logits=True)
        rows = [context.logits(row).copy() for row in range(len(TOKENS))]
        for position in (len(TOKENS), len(TOKENS) + 1):
            context.decode([7], position)
            rows.append(context.logits().copy())
        return np.stack(rows)
    finally:
        context.close()


def logits_before_and_after(path: str) -> None:
    """In a program of its own, where nobody has registered our device yet."""
    model = LlamaModel(Path(path), LoadPlan())
    assert OUR_DEVICE not in registry_as_llama_cpp_sees_it()
    before = stock_logits(model)
    interposer()
    assert OUR_DEVICE in registry_as_llama_cpp_sees_it()
    again = LlamaModel(Path(path), LoadPlan())  # loaded while the device is there
    for loaded in (model, again):
        after = stock_logits(loaded)
        assert np.isfinite(before).all() and np.array_equal(before, after)
        loaded.close()
    print("equal")


def test_a_registered_device_changes_nothing_for_others(tiny: Path) -> None:
    code = "import sys, test_library; test_library.logits_before_and_after(sys.argv[1])"
    path = os.pathsep.join([os.fspath(Path(__file__).parent), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", code, os.fspath(tiny)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "equal\n", "")


class CountingComputer:
    """Refuses all work, and counts how often it was asked."""

    def __init__(self) -> None:
        self.n_calls = 0

    def claim(self, name: str, tensor: int) -> None:
        pass

    def compute(self, graph: int) -> int:
        self.n_calls += 1
        return c.GGML_STATUS_FAILED


class RaisingComputer:
    def claim(self, name: str, tensor: int) -> None:
        pass

    def compute(self, graph: int) -> int:
        raise RuntimeError("computers must not raise, but this one does")


def test_only_the_attached_context_reaches_its_computer(model: LlamaModel) -> None:
    expected = stock_logits(model)
    computer = CountingComputer()
    with interposer().attach(computer):
        ours = LlamaContext(model, ContextPlan(n_ctx=64, n_threads=1))
    foreign = stock_logits(model)
    assert computer.n_calls == 0
    assert np.array_equal(foreign, expected)
    with pytest.raises(NativeError, match="could not evaluate"):
        ours.decode(TOKENS, 0)
    assert computer.n_calls == 1
    ours.close()


def test_two_attached_contexts_reach_their_own_computers(model: LlamaModel) -> None:
    computers = [CountingComputer(), CountingComputer()]
    contexts = []
    for computer in computers:
        with interposer().attach(computer):
            contexts.append(LlamaContext(model, ContextPlan(n_ctx=64, n_threads=1)))
    with pytest.raises(NativeError):
        contexts[1].decode(TOKENS, 0)
    assert [computer.n_calls for computer in computers] == [0, 1]
    for context in contexts:
        context.close()


def test_a_computer_that_raises_fails_the_evaluation(
    model: LlamaModel, caplog: pytest.LogCaptureFixture
) -> None:
    with interposer().attach(RaisingComputer()):
        context = LlamaContext(model, ContextPlan(n_ctx=64, n_threads=1))
    with pytest.raises(NativeError, match="could not evaluate"):
        context.decode(TOKENS, 0)
    context.close()
    assert "this one does" in caplog.text


# Callbacks and log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "on_error", "seen"),
    [
        (ctypes.c_int, -1, -1),
        (ctypes.c_bool, False, False),
        (ctypes.c_void_p, None, None),
        (None, None, None),
    ],
)
def test_an_exception_in_a_callback_is_logged_and_gives_on_error(
    result: Any, on_error: Any, seen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @library.c_callback(ctypes.CFUNCTYPE(result, ctypes.c_int), on_error=on_error)
    def divide(number: int) -> float:
        return 1 // number

    assert divide(0) is seen or divide(0) == seen
    [record, *_] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "divide failed inside a ggml callback"
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


def test_a_callback_that_works_gives_its_value(caplog: pytest.LogCaptureFixture) -> None:
    @library.c_callback(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int), on_error=-1)
    def add(a: int, b: int) -> int:
        return a + b

    assert add(2, 3) == 5
    assert not caplog.records


def load_missing() -> None:
    module = library.llama_cpp()
    library.ggml()
    assert not module.llama_model_load_from_file(
        b"/nonexistent/model.gguf", module.llama_model_default_params()
    )


def test_the_first_error_is_the_cause_without_the_functions_name() -> None:
    with library.collected_complaints() as cause:
        load_missing()
        first = cause()
        load_missing()
    assert "/nonexistent/model.gguf" in first
    assert first.startswith("failed to open")
    assert cause() == first


def test_each_block_begins_without_complaints() -> None:
    with library.collected_complaints() as cause:
        load_missing()
    with library.collected_complaints() as cause:
        assert cause() == "no reason given"


def test_llama_cpps_log_goes_to_ours_at_debug_level(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "ggufmoe"):
        load_missing()
    assert any("/nonexistent/model.gguf" in record.getMessage() for record in caplog.records)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert capfd.readouterr() == ("", "")
