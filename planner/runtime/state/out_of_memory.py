"""What a rank that ran out of memory held, beside what its plan predicts."""

from __future__ import annotations

import resource
import sys
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from planner.runtime.process import device as devices
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.runtime.step.engine import Engine

_engines: list[weakref.ref[Engine]] = []
"""Those of this process, as they were made: an error that leaves the script has none of them."""

_HELD = (("parameters", "parameter_bytes"), ("gradients", "gradient_bytes"))
_STATE = ("optimizer", "optimizer_bytes")
_REST = "activations and all else"

_SAID = (
    "DefaultCPUAllocator: can't allocate",
    "CUDA error: out of memory",  # of the driver: pinned host memory, a context
    "ALLOC_FAILED",  # of cuBLAS, cuDNN: a workspace
)
"""What errors of no type of their own say where there was no memory."""


def watch(engine: Engine) -> None:
    """Let `describe` find an engine for as long as it lives."""
    _engines.append(weakref.ref(engine))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host where it is the device, had no memory for a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)
    )


def describe(error: BaseException, rank: int) -> tuple[str, int | None]:
    """Return predicted against actual by category, as lines, and the most bytes that were held.

    Each engine of the script has a table; the most that was held is that of the process.
    """
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    lines = [f"planner: rank {rank} ran out of memory: {first}"]
    engines = [engine for each in _engines if (engine := each()) is not None]
    if not engines:
        return "\n".join((*lines, "  before planner.apply had made its engine")), None
    held = [_actual(engine) for engine in engines]
    peak = _peak_bytes(engines[0].mesh.device)
    everything = sum(sum(actual.values()) for actual in held)
    for number, (engine, actual) in enumerate(zip(engines, held, strict=True), 1):
        if len(engines) > 1:
            model = engine.plan.model.name
            lines.append(f"  engine {number} of {len(engines)}, {model}, without the others'")
        others = everything - sum(actual.values())
        lines += _table(engine, actual, peak - others)
    return "\n".join(lines), peak


def _table(engine: Engine, actual: dict[str, int], peak: int) -> list[str]:
    every = engine.plan.estimate.get("memory", ())
    place = engine.mesh.rank("pp")
    predicted = dict(every[place]) if place < len(every) else {}
    lines = [f"  {'':26}{'predicted':>12}{'actual':>12}"]
    known = dict((*_HELD, _STATE))
    for name, held in actual.items():
        there = predicted.get(known[name])
        told = "-" if there is None else format_bytes(there)
        lines.append(f"  {name:26}{told:>12}{format_bytes(held):>12}")
    total = predicted.get("total_bytes")
    fields = ("-", "-")
    if total is not None:
        rest = total - sum(predicted.get(known[name], 0) for name in actual)
        fields = format_bytes(rest), format_bytes(total)
    lines.append(f"  {_REST:26}{fields[0]:>12}{format_bytes(peak - sum(actual.values())):>12}")
    lines.append(f"  {'at the height':26}{fields[1]:>12}{format_bytes(peak):>12}")
    return lines


def _actual(engine: Engine) -> dict[str, int]:
    """Bytes by category on the device."""
    device = engine.mesh.device
    params = [p for stage in engine.stages.values() for p in stage.parameters()]
    buffers = [t for stage in engine.stages.values() for t in stage.passed.values()]
    states = [] if engine.optimizer is None else tree_leaves(list(engine.optimizer.state.values()))
    return {
        "parameters": _bytes([*params, *buffers], device),
        "gradients": _bytes(engine._trained.gradients(), device),
        "optimizer": _bytes([t for t in states if isinstance(t, Tensor)], device),
    }


def _peak_bytes(device: torch.device) -> int:
    """The most bytes that were ever held on the device; on a CPU, by the process."""
    if devices.is_accelerator(device):
        return int(devices.of(device).max_memory_reserved(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _bytes(tensors: object, device: torch.device) -> int:
    storages = {}
    for tensor in tensors:  # type: ignore[attr-defined]
        held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if held.device.type == device.type:
            storage = held.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
