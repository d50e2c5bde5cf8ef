"""Every structure, constant and prototype of ``native/declarations.py`` against the headers it was written for.

The headers come out of llama-cpp-python's source distribution (77 MB, fetched once, then kept in pytest's cache).
A small C++ program, compiled against them, prints where every field lies and what every function takes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import pytest

from ggufmoe.native import declarations as c
from ggufmoe.native.library import SUPPORTED_GGML, SUPPORTED_LLAMA_CPP_PYTHON
from ggufmoe.native.llama import FLASH_ATTENTION, KV_TYPES

WANTED = (
    "vendor/llama.cpp/include/",
    "vendor/llama.cpp/ggml/include/",
    "vendor/llama.cpp/ggml/src/",
    "vendor/llama.cpp/ggml/CMakeLists.txt",
)
INCLUDES = ("include", "ggml/include", "ggml/src")
HEADERS = (
    "ggml.h",
    "ggml-alloc.h",
    "ggml-backend.h",
    "ggml-cpu.h",
    "ggml-rpc.h",
    "gguf.h",
    "llama.h",
    "ggml-impl.h",
    "ggml-backend-impl.h",
)

# enum gguf_type -> what a value of it is; strings and arrays aside
GGUF_SCALARS: dict[str, type[Any]] = {
    "UINT8": ctypes.c_uint8,
    "INT8": ctypes.c_int8,
    "UINT16": ctypes.c_uint16,
    "INT16": ctypes.c_int16,
    "UINT32": ctypes.c_uint32,
    "INT32": ctypes.c_int32,
    "FLOAT32": ctypes.c_float,
    "BOOL": ctypes.c_bool,
    "UINT64": ctypes.c_uint64,
    "INT64": ctypes.c_int64,
    "FLOAT64": ctypes.c_double,
}

# Turns a C type into text: a letter for its kind and its size in bytes ("u8" is size_t, "p8" a pointer), "*n" for
# an array, "result(arguments)" for a pointer to a function. Enums count as signed integers, as they do in ctypes.
DESCRIBE = r"""
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

void ggml_abort(const char *, int, const char *, ...) { std::abort(); }  // inline functions of the headers want it

template <class T> struct kind {
    static std::string text() {
        const char * letter =
            std::is_same<T, bool>::value  ? "b" : std::is_same<T, char>::value ? "c" :
            std::is_enum<T>::value        ? "i" : std::is_floating_point<T>::value ? "f" :
            std::is_integral<T>::value    ? (std::is_signed<T>::value ? "i" : "u") :
            std::is_pointer<T>::value     ? "p" : "s";
        return letter + std::to_string(sizeof(T));
    }
};
template <> struct kind<void> { static std::string text() { return "v"; } };
template <class T, size_t N> struct kind<T[N]> {
    static std::string text() { return kind<T>::text() + "*" + std::to_string(N); }
};
template <class R, class... A> struct kind<R (*)(A...)> {
    static std::string text() {
        std::string arguments;
        ((arguments += (arguments.empty() ? "" : ",") + kind<std::remove_cv_t<A>>::text()), ...);
        return kind<R>::text() + "(" + arguments + ")";
    }
};

template <class R, class... A> std::string signature(R (*)(A...)) {
    return (kind<R>::text() + ... + (" " + kind<A>::text()));
}

#define STRUCT(S)      std::printf("struct %s %zu\n", #S, sizeof(struct S));
#define FIELD(S, F)    std::printf("field %s.%s %zu %zu %s\n", #S, #F, offsetof(struct S, F), \
                           sizeof(((struct S *) nullptr)->F), kind<decltype(S::F)>::text().c_str());
#define CONSTANT(C)    std::printf("constant %s %lld\n", #C, (long long) (C));
#define FUNCTION(F)    std::printf("function %s %s\n", #F, signature((decltype(&F)) nullptr).c_str());
#define TYPE(N, T)     std::printf("type %s %s\n", #N, kind<T>::text().c_str());
"""

Structures = Mapping[str, type[ctypes.Structure]]
Prototypes = Mapping[str, tuple[Any, tuple[Any, ...]]]

STRUCTURES: Structures = {
    name: value
    for name, value in vars(c).items()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure
}
PROTOTYPES: Prototypes = {**c.PROTOTYPES, **c.RPC_PROTOTYPES}
CALLBACKS = {"ggml_abort_callback_t": c.abort_callback_t, "ggml_log_callback": c.log_callback_t}
CONSTANTS: Mapping[str, int] = {
    **{
        name: value
        for name, value in vars(c).items()
        if isinstance(value, int) and name.startswith(("GGML_", "LLAMA_", "GGUF_", "RPC_"))
    },
    "RPC_PROTO_MAJOR_VERSION": c.RPC_PROTO_VERSION[0],
    "RPC_PROTO_MINOR_VERSION": c.RPC_PROTO_VERSION[1],
    **{f"GGML_TYPE_{name.upper()}": number for name, number in KV_TYPES.items()},
    "LLAMA_FLASH_ATTN_TYPE_AUTO": FLASH_ATTENTION["auto"],
    "LLAMA_FLASH_ATTN_TYPE_DISABLED": FLASH_ATTENTION["off"],
    "LLAMA_FLASH_ATTN_TYPE_ENABLED": FLASH_ATTENTION["on"],
    **{
        f"GGUF_TYPE_{name}": number
        for number, declared in c.GGUF_SCALARS.items()
        for name, scalar in GGUF_SCALARS.items()
        if declared is scalar
    },
}


# The headers and the compiler ----------------------------------------------------------------------------


def cannot_check(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def llama_cpp_source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of the pinned llama.cpp, in the folders where they stand in its repository."""
    name = f"llama-cpp-python-{SUPPORTED_LLAMA_CPP_PYTHON}"
    cache = getattr(request.config, "cache", None)
    parent = cache.mkdir(name) if cache else tmp_path_factory.mktemp(name)
    source = Path(parent) / "llama.cpp"
    if not source.is_dir():
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            _unpack(_download(Path(folder)), Path(folder) / "llama.cpp")
            (Path(folder) / "llama.cpp").replace(source)
    return source


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--quiet"]
    command += [
        "--disable-pip-version-check",
        "--retries",
        "1",
        "--timeout",
        "15",
        "--dest",
        os.fspath(folder),
    ]
    command.append(f"llama-cpp-python=={SUPPORTED_LLAMA_CPP_PYTHON}")
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except subprocess.CalledProcessError as error:
        cannot_check(f"llama-cpp-python's source cannot be downloaded: {error.stderr.strip()[-500:]}")
    except subprocess.TimeoutExpired:
        cannot_check("llama-cpp-python's source cannot be downloaded within 300 s")
    [archive] = folder.glob("*.tar.gz")
    return archive


def _unpack(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])  # without llama_cpp_python-0.3.36/
            if not member.isfile() or not str(path).startswith(WANTED) or not _is_wanted(path):
                continue
            content = tar.extractfile(member)
            assert content is not None
            place = target / path.relative_to("vendor/llama.cpp")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.read())


def _is_wanted(path: PurePosixPath) -> bool:
    in_source = path.parts[3:4] == ("src",)
    return not in_source or path.parts[4] == "ggml-rpc" or (len(path.parts) == 5 and path.suffix == ".h")


@pytest.fixture(scope="session")
def compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    cannot_check("there is no C++ compiler (c++, g++ or clang++)")


@pytest.fixture(scope="session")
def facts(llama_cpp_source: Path, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the headers say, by "struct NAME", "field NAME.NAME", "constant NAME", "function NAME", "type NAME"."""
    folder = tmp_path_factory.mktemp("abi")
    lines = [f'#include "{header}"' for header in HEADERS]
    lines += [DESCRIBE, *_rpc_internals(llama_cpp_source), "int main() {"]
    for name, structure in STRUCTURES.items():
        lines.append(f"STRUCT({name})")
        lines += [f"FIELD({name}, {field.rstrip('_')})" for field in _fields(structure)]
    lines += [f"CONSTANT({name})" for name in CONSTANTS]
    lines += [f"FUNCTION({name})" for name in PROTOTYPES]
    lines += [f"TYPE({name}, {name})" for name in CALLBACKS]
    (folder / "probe.cpp").write_text("\n".join([*lines, "}"]), encoding="utf-8")
    include = [f"-I{llama_cpp_source / place}" for place in INCLUDES]
    command = [compiler, "-std=c++17", "-O0", "-w", *include, "probe.cpp", "-o", "probe"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    printed = subprocess.run(
        [folder / "probe"], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    return {" ".join(words[:2]): " ".join(words[2:]) for words in map(str.split, printed.splitlines())}


def _rpc_internals(source: Path) -> Iterator[str]:
    """What no header of the RPC backend declares, cut out of its source."""
    commands = re.search(
        r"enum rpc_cmd \{.*?\};", _text(source / "ggml/src/ggml-rpc/ggml-rpc.cpp"), re.DOTALL
    )
    size = re.search(r".*\bRPC_CONN_CAPS_SIZE = .*;", _text(source / "ggml/src/ggml-rpc/transport.h"))
    assert commands, "ggml-rpc.cpp has no enum rpc_cmd"
    assert size, "transport.h has no RPC_CONN_CAPS_SIZE"
    yield from (commands[0], size[0])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# What we declare, in the words of the probe --------------------------------------------------------------


def _fields(structure: type[ctypes.Structure]) -> dict[str, Any]:
    return {field[0]: field[1] for field in structure._fields_}


def describe(declared: Any) -> str:
    if declared is None:
        return "v"
    size = ctypes.sizeof(declared)
    if issubclass(declared, ctypes.Array):
        return f"{describe(declared._type_)}*{declared._length_}"
    if issubclass(declared, ctypes.Structure):
        return f"s{size}"
    if hasattr(declared, "_restype_"):  # a CFUNCTYPE
        return f"{describe(declared._restype_)}({','.join(map(describe, declared._argtypes_))})"
    if issubclass(declared, ctypes._Pointer):
        return f"p{size}"
    letters = {"?": "b", "c": "c", "f": "f", "d": "f", "z": "p", "P": "p"}
    code: str = declared._type_
    return f"{letters.get(code, 'i' if code.islower() else 'u')}{size}"


def same(ours: str, theirs: str) -> bool:
    """Where we declare a plain pointer, C may have a pointer to a function, which we then never call."""
    return ours == theirs or (ours == f"p{ctypes.sizeof(ctypes.c_void_p)}" and theirs.endswith(")"))


def layout_faults(structures: Structures, facts: Mapping[str, str]) -> list[str]:
    faults = []
    for name, structure in structures.items():
        if facts[f"struct {name}"] != str(ctypes.sizeof(structure)):
            faults.append(
                f"{name} is {ctypes.sizeof(structure)} bytes, in the header {facts[f'struct {name}']}"
            )
        for field, declared in _fields(structure).items():
            place = getattr(structure, field)
            c_name = f"{name}.{field.rstrip('_')}"
            offset, size, kind = facts[f"field {c_name}"].split()
            ours, theirs = (place.offset, place.size), (int(offset), int(size))
            if ours != theirs:
                faults.append(f"{c_name} lies at {ours}, in the header at {theirs} (offset, size)")
            if not same(describe(declared), kind):
                faults.append(f"{c_name} is {describe(declared)}, in the header {kind}")
    return faults


def prototype_faults(prototypes: Prototypes, facts: Mapping[str, str]) -> list[str]:
    """In a prototype's text the result stands in front of the arguments."""
    faults = []
    for name, (result, arguments) in prototypes.items():
        ours = [describe(declared) for declared in (result, *arguments)]
        theirs = facts[f"function {name}"].split()
        if len(ours) != len(theirs) or not all(map(same, ours, theirs)):
            faults.append(f"{name} is {' '.join(ours)}, in the header {' '.join(theirs)}")
    return faults


# Tests ---------------------------------------------------------------------------------------------------


def test_every_field_lies_where_the_header_puts_it(facts: dict[str, str]) -> None:
    assert len(STRUCTURES) >= 12
    assert not layout_faults(STRUCTURES, facts)


def test_every_prototype_is_the_headers(facts: dict[str, str]) -> None:
    assert len(PROTOTYPES) > 70
    assert not prototype_faults(PROTOTYPES, facts)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_of_the_library_have_the_headers_signature(name: str, facts: dict[str, str]) -> None:
    ours, theirs = describe(CALLBACKS[name]), facts[f"type {name}"]
    assert ours == theirs


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_the_headers(name: str, facts: dict[str, str]) -> None:
    assert int(facts[f"constant {name}"]) == CONSTANTS[name]


def test_every_gguf_type_is_known(facts: dict[str, str]) -> None:
    assert set(c.GGUF_SCALARS.values()) == set(GGUF_SCALARS.values())
    assert len(c.GGUF_SCALARS) == len(GGUF_SCALARS)
    named = [name for name in CONSTANTS if name.startswith("GGUF_TYPE_")]
    assert sorted(CONSTANTS[name] for name in named) == list(range(13))


def test_the_source_is_of_the_supported_ggml(llama_cpp_source: Path) -> None:
    text = _text(llama_cpp_source / "ggml/CMakeLists.txt")
    numbers = re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", text)
    assert ".".join(numbers) == SUPPORTED_GGML


# The checks can fail -------------------------------------------------------------------------------------


def _changed(name: str, change: dict[str, Any]) -> Structures:
    """A copy of one structure with fields of other types; None leaves the field out."""
    wanted = {**_fields(STRUCTURES[name]), **change}
    fields = [(field, declared) for field, declared in wanted.items() if declared is not None]
    return {name: type(name, (ctypes.Structure,), {"_fields_": fields})}


def test_a_missing_field_is_reported(facts: dict[str, str]) -> None:
    faults = layout_faults(_changed("ggml_cgraph", {"grad_accs": None}), facts)
    assert "ggml_cgraph.uid lies at (80, 8), in the header at (88, 8) (offset, size)" in faults
    assert any(fault.startswith("ggml_cgraph is ") for fault in faults)


def test_a_field_of_another_size_is_reported(facts: dict[str, str]) -> None:
    faults = layout_faults(_changed("ggml_backend_dev_caps", {"host_buffer": ctypes.c_int}), facts)
    assert any(fault.startswith("ggml_backend_dev_caps.host_buffer lies at") for fault in faults)


def test_a_field_of_another_kind_is_reported(facts: dict[str, str]) -> None:
    faults = layout_faults(_changed("ggml_tensor", {"view_offs": ctypes.c_double}), facts)
    assert faults == ["ggml_tensor.view_offs is f8, in the header u8"]


def test_a_callback_with_another_signature_is_reported(facts: dict[str, str]) -> None:
    wrong = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
    faults = layout_faults(_changed("ggml_backend_device_i", {"supports_op": wrong}), facts)
    assert faults == ["ggml_backend_device_i.supports_op is b1(p8), in the header b1(p8,p8)"]


@pytest.mark.parametrize(
    "arguments", [(ctypes.c_void_p,), (ctypes.c_void_p, ctypes.c_int32), (ctypes.c_void_p, ctypes.c_int64)]
)
def test_a_prototype_with_other_arguments_is_reported(
    arguments: tuple[Any, ...], facts: dict[str, str]
) -> None:
    name = "ggml_backend_buft_alloc_buffer"  # takes a pointer and a size_t
    [fault] = prototype_faults({name: (ctypes.c_void_p, arguments)}, facts)
    assert fault.startswith(f"{name} is p8 p8") and fault.endswith(", in the header p8 p8 u8")


def test_a_prototype_with_another_result_is_reported(facts: dict[str, str]) -> None:
    faults = prototype_faults({"ggml_blck_size": (ctypes.c_int, (ctypes.c_int,))}, facts)
    assert faults == ["ggml_blck_size is i4 i4, in the header i8 i4"]
