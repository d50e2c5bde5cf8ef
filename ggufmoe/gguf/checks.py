"""What llama.cpp would end the process over, or refuse without naming the cause, checked before it is called.

Not every assertion of llama.cpp is repeated here: ``native.aborts`` turns the others into an error. These are
the ones for which a file is known, and where the key, its value and its limit help the user.
An architecture that llama.cpp does not know is left to its loader, whose message names it.
"""

from __future__ import annotations

import math
import re

from ..errors import FormatError
from .model import MAX_LAYERS, Model

MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS, src/llama-hparams.h
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # LLAMA_ROPE_SCALING_TYPES, src/llama-model.cpp
# llama.cpp divides by these without a look (SIGFPE, which nothing can catch). Elsewhere a 0 is usual: its model
# saver writes every key.
DIVISORS = {
    "ernie4_5-moe": ("interleave_moe_layer_step",),
    "minimax-01": ("full_attention_interval",),
    "qwen35moe": ("full_attention_interval",),
    "qwen3next": ("full_attention_interval",),
}
ROUTER_NAME = re.compile(r"blk\.(?P<layer>\d+)\.ffn_gate_inp\.weight")

OLD_LAYOUT_HINT = "Fetch a newer file of this model, or convert it with llama.cpp of after April 2024."
OLLAMA_HINT = "Fetch a GGUF file of this model that was made for llama.cpp, or run this one with Ollama."
METADATA_HINT = "The file's metadata is wrong; fetch it again, or from another source."


def check_moe(model: Model) -> None:
    """Refuse what is not a Mixture-of-Experts model, or not one whose experts we can find.

    Raises: FormatError that names the reason and the next step.
    """
    path, arch = model.paths[0], model.architecture
    if not arch:
        raise FormatError(
            f"{path}: the file names no architecture (general.architecture)", hint=METADATA_HINT
        )
    if model.has_old_expert_layout:
        raise FormatError(
            f"{path}: one tensor per expert (blk.0.ffn_gate.0.weight), an old layout that llama.cpp no "
            "longer reads",
            hint=OLD_LAYOUT_HINT,
        )
    unrecognised = _layers_without_experts(model)
    if unrecognised:
        raise FormatError(
            f"{path}: layer {unrecognised[0]} has a router, but none of its expert tensors was recognised",
            hint="ggufmoe knows llama.cpp's tensor names only; please report this model.",
        )
    if not model.banks:
        n_expert = model.get("expert_count", 0)
        if n_expert > 0:
            raise FormatError(
                f"{path}: {arch}.expert_count is {n_expert}, but no expert tensor was recognised",
                hint="ggufmoe knows llama.cpp's tensor names only; please report this model.",
            )
        raise FormatError(
            f"{path}: a dense model ({arch}): it has no routed experts to place",
            hint="Use llama.cpp or Ollama as it is; ggufmoe helps Mixture-of-Experts models.",
        )


def _layers_without_experts(model: Model) -> list[int]:
    """Layers that choose experts by a router, and have none that we know."""
    matches = (ROUTER_NAME.fullmatch(tensor.name) for tensor in model.tensors)
    routed = {int(match["layer"]) for match in matches if match}
    return sorted(routed - {bank.layer for bank in model.banks})


def expert_faults(model: Model) -> list[str]:
    """What contradicts itself in the metadata of the experts; llama.cpp asserts each of these.

    Source: ``llama_model_base::load_hparams`` in src/llama-model.cpp.
    """
    arch = model.architecture
    n_expert = model.get("expert_count", 0)
    used = model.per_layer("expert_used_count", 0)
    n_used = min(used, default=0) if min(used, default=0) < 0 else max(used, default=0)
    n_group, n_group_used = model.get("expert_group_count", 0), model.get("expert_group_used_count", 0)
    faults = [
        f"{arch}.{key} is {model.metadata[f'{arch}.{key}']!r}, it must be a number"
        for key in ("expert_count", "expert_group_count", "expert_group_used_count")
        if type(model.metadata.get(f"{arch}.{key}", 0)) is not int
    ]
    if n_expert > MAX_EXPERTS:
        faults.append(f"{arch}.expert_count is {n_expert}, the limit is {MAX_EXPERTS}")
    if not 0 < n_used <= n_expert:
        faults.append(f"{arch}.expert_used_count is {n_used}, it must be 1 to expert_count ({n_expert})")
    if n_group >= max(n_expert, 1):
        faults.append(f"{arch}.expert_group_count is {n_group}, it must be below expert_count ({n_expert})")
    elif n_group > 1:
        if n_expert % n_group:
            faults.append(f"{arch}.expert_group_count is {n_group}, it must divide expert_count ({n_expert})")
        if not 0 < n_group_used < n_group:
            faults.append(
                f"{arch}.expert_group_used_count is {n_group_used}, it must be 1 to {n_group - 1} "
                "(below expert_group_count)"
            )
    for bank in model.banks:
        if bank.name == "exps" and bank.n_expert != n_expert:
            faults.append(
                f"{arch}.expert_count is {n_expert}, but layer {bank.layer} holds {bank.n_expert} experts"
            )
            break
        if bank.layer < len(used) and used[bank.layer] == 0 and n_used > 0:
            faults.append(
                f"{arch}.expert_used_count is 0 for layer {bank.layer}, which holds {bank.n_expert} experts"
            )
            break
    return faults


def parameter_faults(model: Model) -> list[str]:
    """What is wrong in the other hyperparameters, as far as llama.cpp asserts it for every architecture.

    Source: ``llama_model_base::load_hparams`` in src/llama-model.cpp; ``load_arch_hparams`` in src/models.
    """
    arch = model.architecture
    faults = [
        f"{arch}.{key} is missing"
        for key in ("block_count", "embedding_length", "context_length")
        if f"{arch}.{key}" not in model.metadata
    ]
    n_layer = model.get("block_count", 1)
    if not 0 < n_layer <= MAX_LAYERS:
        faults.append(f"{arch}.block_count is {n_layer}, it must be 1 to {MAX_LAYERS}")
    n_nextn = model.get("nextn_predict_layers", 0)
    if n_nextn > n_layer:
        faults.append(f"{arch}.nextn_predict_layers is {n_nextn}, it must not exceed block_count ({n_layer})")
    not_zero = DIVISORS.get(arch, ())
    if any(model.per_layer("attention.head_count", 0)[:1]):  # RoPE over 0 dimensions never ends
        not_zero = (*not_zero, "rope.dimension_count")
    faults += [f"{arch}.{key} is 0, it must be 1 or more" for key in not_zero if model.get(key, 1) == 0]
    scaling = model.get("rope.scaling.type", "none")
    if scaling not in ROPE_SCALINGS:
        faults.append(
            f"{arch}.rope.scaling.type is {scaling!r}, it must be one of {', '.join(ROPE_SCALINGS)}"
        )
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        epsilon = model.get(key, 0.0)
        if not (math.isfinite(epsilon) and epsilon >= 0):
            faults.append(f"{arch}.{key} is {epsilon}, it must be a number of 0 or more")
    beyond = [bank.layer for bank in model.banks if bank.layer >= n_layer]
    if beyond:
        faults.append(f"{arch}.block_count is {n_layer}, but there are experts in layer {beyond[0]}")
    return faults


def check_runnable(model: Model) -> None:
    """``check_moe``, made for llama.cpp, and no fault that llama.cpp would end the process over.

    Raises: FormatError that names the difference, or the key, its value and the limit.
    """
    check_moe(model)
    path = model.paths[0]
    if model.ollama_differences:
        raise FormatError(
            f"{path}: a file made for Ollama's own engine: {'; '.join(model.ollama_differences)}",
            hint=OLLAMA_HINT,
        )
    faults = parameter_faults(model) + expert_faults(model)
    if faults:
        raise FormatError(f"{path}: {faults[0]}", hint=METADATA_HINT)
