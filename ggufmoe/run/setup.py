"""From what the user asked for to where everything goes: devices, dense weights, residents, cold store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ..errors import MemoryPlanError, UsageError
from ..gguf.experts import is_expert_tensor
from ..gguf.model import Model
from ..moe.kv import context_memory
from ..moe.policies import DEFAULT_POLICY
from ..moe.ram import RamPlan, plan_ram
from ..moe.residents import Placement, ResidentRequest, place_residents
from ..moe.rules import Rule, exact_patterns, first_match, unmatched
from ..native.devices import Device, buffer_type, find_device, host_buffer_type, list_devices
from ..native.llama import LoadPlan
from ..native.rpc import add_rpc_server

log = logging.getLogger(__name__)

COLD_STORES = ("auto", "mmap", "repack", "pinned")
ALL_LAYERS = 9999
DEFAULT_CONTEXT = 4096
# Left to llama.cpp's compute buffers and the device's driver when a budget is divided.
COMPUTE_RESERVE_BYTES = 512 << 20
# RAM that `--cold-store auto` leaves to everything else.
RAM_MARGIN_BYTES = 2 << 30


@dataclass(frozen=True)
class SessionOptions:
    """What a user can ask of a session; the defaults suit most.

    ``devices`` are names of ggml devices that hold the slots, and the dense weights unless they are the CPU.
    ``vram_bytes`` is what may be used of each device, ``ram_bytes`` of the RAM: experts that do not fit are read
    from the disk when they are routed. ``context`` is in tokens; 0 means as many as the model
    was trained for, None those but at most ``DEFAULT_CONTEXT``. ``rpc_endpoints`` are ``HOST:PORT``.
    ``policy`` names who moves experts between slots (``ggufmoe.moe.policies``). ``prefill`` fixes how batches are
    computed (``ggufmoe.native.batch``), None finds out what is fastest. ``prefetch_depth`` is how many layers ahead
    experts are named and uploaded early, None finds out whether it pays. ``trace`` is a file to record all routing
    in; ``routing_from`` one to take it from instead of the router, for benchmarks only. ``upload_share`` fixes the
    share of the time that may go into uploads, None lets them go on while they pay; ``before_upload`` is called in
    the uploading thread with every expert, for measurements and tests.
    """

    devices: tuple[str, ...] = ()
    rpc_endpoints: tuple[str, ...] = ()
    residents: ResidentRequest = field(default_factory=ResidentRequest)
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    rules: tuple[Rule, ...] = ()
    cold_store: str = "auto"
    threads: int | None = None
    context: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    policy: str = DEFAULT_POLICY
    prefill: str | None = None
    prefetch_depth: int | None = 0
    trace: Path | None = None
    routing_from: Path | None = None
    upload_share: float | None = None
    before_upload: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Setup:
    """Where everything goes. ``slot_devices[i]`` is the device that index ``i`` of the placement means."""

    load: LoadPlan
    slot_devices: tuple[Device, ...]
    placement: Placement
    cold_store: str
    n_threads: int
    n_ctx: int
    ram: RamPlan | None = None  # experts are read on demand


def prepare(model: Model, options: SessionOptions) -> Setup:
    """Decide everything that can be decided before llama.cpp loads the model.

    Raises: UsageError for devices or rules that do not exist; MemoryPlanError if the budget is too small;
    NativeError if an RPC server does not answer.
    """
    slot_devices = choose_devices(options) if options.ram_bytes is None else _no_devices(options)
    n_threads = options.threads or psutil.cpu_count(logical=False) or 1
    trained = model.get("context_length", 0) or DEFAULT_CONTEXT
    n_ctx = min(trained, DEFAULT_CONTEXT) if options.context is None else options.context or trained
    _check_rules(model, options.rules)
    ram = None
    if options.ram_bytes is not None:
        ram = plan_ram(model, options.ram_bytes, n_ctx, min(options.n_ubatch, n_ctx))
    budgets = _slot_budgets(model, options, slot_devices, n_ctx)
    placement = place_residents(
        model.banks, options.residents, options.rules, [device.name for device in slot_devices], budgets
    )
    wanted = options.cold_store if ram is None else "disk"
    cold_store = choose_cold_store(model, wanted, slot_devices, placement)
    llama_devices = tuple(device for device in slot_devices if not device.is_cpu)
    load = LoadPlan(
        devices=llama_devices,
        n_gpu_layers=ALL_LAYERS if llama_devices else 0,
        overrides=_overrides(model, options.rules, slot_devices, cold_store),
        repack=cold_store == "repack",
        mmap=cold_store != "pinned",
    )
    return Setup(load, slot_devices, placement, cold_store, n_threads, n_ctx, ram)


def _no_devices(options: SessionOptions) -> tuple[Device, ...]:
    """The experts of ``--ram`` have no slots but the RAM. Raises: UsageError for what asks for others."""
    others = {
        "--device": options.devices,
        "--rpc": options.rpc_endpoints,
        "--vram": options.vram_bytes is not None,
        "--resident-experts": options.residents != ResidentRequest(),
        "--trace": options.trace is not None,
    }
    for name, asked in others.items():
        if asked:
            raise UsageError(
                f"--ram keeps the experts in RAM and on the disk; it cannot be combined with {name}.",
                hint=f"Leave out --ram or {name}.",
            )
    if options.cold_store not in ("auto", "mmap"):
        raise UsageError(f"--ram cannot be combined with --cold-store {options.cold_store}.")
    return ()


def choose_devices(options: SessionOptions) -> tuple[Device, ...]:
    """The slot devices: those named; else what RPC servers offer; else the first GPU; else none.

    Without any of them, residents that were asked for go to ``cpu``, which moves nothing but behaves the same.
    """
    offered = [device for endpoint in options.rpc_endpoints for device in add_rpc_server(endpoint)]
    if options.devices:
        chosen = {device.address: device for device in map(find_device, options.devices)}
        return tuple(chosen.values())
    if offered:
        return tuple(offered)
    gpus = [device for device in list_devices() if device.kind in ("gpu", "igpu") and not device.is_rpc]
    if gpus:
        return (gpus[0],)
    if options.residents != ResidentRequest() or options.vram_bytes:
        return (find_device("cpu"),)
    return ()


def _check_rules(model: Model, rules: Sequence[Rule]) -> None:
    dense = [tensor.name for tensor in model.dense_tensors]
    for rule in unmatched(rules, dense, model.banks):
        raise UsageError(
            f"The rule {rule} matches no tensor of this model.",
            hint="Names look like blk.3.attn_q.weight, and blk.3.ffn_up_exps.12.weight for an expert.",
        )


def _slot_budgets(
    model: Model, options: SessionOptions, devices: Sequence[Device], n_ctx: int
) -> list[int] | None:
    """Bytes for slots on each device; None where only the user's own numbers count."""
    budgets = []
    for device in devices:
        if options.vram_bytes is not None:
            budgets.append(options.vram_bytes)
        elif device.is_cpu or device.is_rpc or options.residents != ResidentRequest():
            return None
        else:
            budgets.append(device.free_bytes)
    gpus = [index for index, device in enumerate(devices) if not device.is_cpu]
    if not gpus:
        return budgets or None
    dense = sum(tensor.n_bytes for tensor in model.dense_tensors if tensor.name != "token_embd.weight")
    memory = context_memory(model, n_ctx)
    fixed = (dense + (memory.n_bytes if memory else 0)) // len(gpus) + COMPUTE_RESERVE_BYTES
    for index in gpus:
        if fixed > budgets[index]:
            raise MemoryPlanError(
                f"The dense weights, the KV cache of {n_ctx} tokens and working memory need {fixed:,} bytes of "
                f"{devices[index].name}, the budget is {budgets[index]:,} ({fixed - budgets[index]:,} too few).",
                hint="Raise --vram, lower --context, or use --device cpu.",
            )
        budgets[index] -= fixed
    return budgets


def choose_cold_store(model: Model, wanted: str, devices: Sequence[Device], placement: Placement) -> str:
    """``repack`` where the RAM holds a second form of the experts, else ``mmap``; or what the user asked for."""
    if wanted == "pinned":
        if not any(host_buffer_type(device) for device in devices):
            raise UsageError(
                "--cold-store pinned needs a device with host memory of its own, such as CUDA.",
                hint="Use --cold-store mmap or repack; `ggufmoe devices` lists the devices.",
            )
        return wanted
    if wanted != "auto":
        return wanted
    experts = sum(bank.n_bytes for bank in model.banks)
    available = psutil.virtual_memory().available
    store = "repack" if experts + RAM_MARGIN_BYTES < available else "mmap"
    log.debug("cold store %s: experts %d bytes, available %d bytes", store, experts, available)
    return store


def _overrides(
    model: Model, rules: Sequence[Rule], devices: Sequence[Device], cold_store: str
) -> tuple[tuple[str, int], ...]:
    """The user's dense rules, then all expert tensors to where cold experts lie, as llama.cpp wants them."""
    cpu = find_device("cpu")
    by_name = {device.name.lower(): device for device in (cpu, *devices)}
    overrides: list[tuple[str, int]] = []
    if rules:
        targets: dict[str, list[str]] = {}
        for tensor in model.dense_tensors:
            rule = first_match(rules, tensor.name)
            if rule:
                targets.setdefault(rule.device.lower(), []).append(tensor.name)
        for name, tensors in targets.items():
            if name not in by_name:
                raise UsageError(
                    f"A rule places {tensors[0]} on {name!r}, a device that is not in use.",
                    hint="Add it with --device; `ggufmoe devices` lists what there is.",
                )
            overrides += [(pattern, buffer_type(by_name[name])) for pattern in exact_patterns(tensors)]
    if cold_store == "pinned":
        store = next(found for device in devices if (found := host_buffer_type(device)))
    else:
        store = buffer_type(cpu)
    experts = [tensor.name for tensor in model.tensors if is_expert_tensor(tensor.name)]
    overrides += [(pattern, store) for pattern in exact_patterns(experts)]
    return tuple(overrides)
