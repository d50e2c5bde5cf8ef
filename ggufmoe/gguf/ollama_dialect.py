"""Files that were made for Ollama's own engine: GGUF, but not as llama.cpp reads it.

They can be inspected like any other. llama.cpp refuses to run them, for reasons that do not name the cause
("expected 62, got 61", "key not found", "block size 0"), so we name it.
Source: Ollama's fs/ggml/type.go (type numbers) and llama/compat (what it translates for llama.cpp).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Mapping

from .scanner import Scan

# llama.cpp dropped its own type number 4 before GGUF existed, so in a GGUF file it can only mean this.
OLLAMA_MXFP4, LLAMA_CPP_MXFP4 = 4, 39

# Vision and audio parts inside the text model's file; for llama.cpp they are a file of their own (mmproj).
# No text model of llama.cpp has a tensor of these names.
EXTRA_TENSOR = re.compile(r"(?:v|a|s|mm)\..+", re.DOTALL)

# Architectures by names that only Ollama's engine has, with llama.cpp's name for the same
RENAMED = {"gptoss": "gpt-oss", "glm4moelite": "deepseek2"}

# Every MoE architecture of llama.cpp 0c1e57098 requires one of them (src/models/*.cpp, load_arch_hparams);
# Ollama's engine has defaults of its own. Other keys differ from architecture to architecture, and for those
# llama.cpp's own message names the key.
NORM_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def is_extra_tensor(name: str) -> bool:
    """Whether the tensor belongs to a vision or audio part, which llama.cpp expects in another file."""
    return EXTRA_TENSOR.fullmatch(name) is not None


def with_llama_cpp_types(data: bytes, scan: Scan) -> tuple[bytes, tuple[str, ...]]:
    """The header with Ollama's number for MXFP4 replaced by llama.cpp's, and the tensors that had it.

    The sizes agree (17 bytes per 32 weights). The order of the weights in a block does not: Ollama's engine
    shuffles nibbles as it loads, so the bytes must not be handed to llama.cpp as they are.
    """
    found = [tensor for tensor in scan.tensors if tensor.type_number == OLLAMA_MXFP4]
    # the data section begins within an alignment of the table's end; what lies behind is not needed
    patched = bytearray(data[: scan.end + (2 << 20)])
    for tensor in found:
        struct.pack_into("<I", patched, tensor.type_position, LLAMA_CPP_MXFP4)
    return bytes(patched), tuple(tensor.name for tensor in found)


def ollama_differences(
    metadata: Mapping[str, object], tensor_names: Iterable[str], renumbered: Collection[str] = ()
) -> tuple[str, ...]:
    """What llama.cpp cannot read, if the file was made for Ollama's own engine; else nothing."""
    architecture = metadata.get("general.architecture")
    found = []
    if isinstance(architecture, str) and architecture in RENAMED:
        found.append(f"its architecture is called {architecture}, in llama.cpp {RENAMED[architecture]}")
    if renumbered:
        found.append(
            f"{_counted(renumbered)} of type number {OLLAMA_MXFP4}, Ollama's MXFP4 (llama.cpp's is "
            f"{LLAMA_CPP_MXFP4})"
        )
    extra = [name for name in tensor_names if is_extra_tensor(name)]
    if extra:
        found.append(f"{_counted(extra)} of a vision or audio part")
    # a file without block_count states no hyperparameters at all: a projector, a vocabulary, a fragment
    has_parameters = f"{architecture}.block_count" in metadata
    if has_parameters and not any(f"{architecture}.{key}" in metadata for key in NORM_EPSILONS):
        found.append(f"the key {architecture}.{NORM_EPSILONS[0]} is left out")
    return tuple(found)


def _counted(names: Collection[str]) -> str:
    first = next(iter(names))
    return f"the tensor {first}" if len(names) == 1 else f"{len(names):,} tensors ({first}, ...)"
