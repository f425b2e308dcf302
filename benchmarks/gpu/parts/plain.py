"""The same model in plain PyTorch: FSDP2, fused AdamW, bfloat16; eager and compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.cases import StepCase, step_cases
from benchmarks.gpu.parts.alone import batch_of, be_alone, builder, freed, peak_bytes, step_seconds
from benchmarks.gpu.results import Result, Setting


def run(setting: Setting) -> Iterator[Result]:
    """Yield a result eager and one compiled, for the first cases that train as they are."""
    be_alone(setting)
    import torch
    import torch.distributed as dist

    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if setting.device == "cuda" else "gloo")
    if setting.device == "cuda":
        torch.cuda.set_device(device)
    cases = {case.name: case for case in step_cases(tiny=setting.tiny)}
    names = ("tiny",) if setting.tiny else ("llama 8B width", "llama 1B")
    # A CPU's compiler takes longer than all the rest of a trial.
    for name, compiled in [(n, c) for n in names for c in (False, True)][
        : 1 if setting.tiny else 4
    ]:
        check = f"{name}{' compiled' if compiled else ''}"
        if check in setting.known:
            continue
        with freed(setting):
            yield _trained(cases[name], check, setting, device, compiled=compiled)
    dist.destroy_process_group()


def _trained(
    case: StepCase, check: str, setting: Setting, device: Any, *, compiled: bool
) -> Result:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    began = time.monotonic()
    try:
        with torch.device(device):
            model = builder(case)()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            if compiled:
                layer.compile(dynamic=False)
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        whole = {name: tensor.to(device) for name, tensor in batch_of(case).items()}
        parts = [
            {name: tensor[start : start + case.microbatch_size] for name, tensor in whole.items()}
            for start in range(0, len(whole["ids"]), case.microbatch_size)
        ]

        def step() -> None:
            for part in parts:
                (model(**part) / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()

        measured = {"step_s": step_seconds(step, setting), **peak_bytes(step, setting)}
    except Exception as error:
        note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Result(part="plain", check=check, status="fail", note=note)
    return Result(
        part="plain",
        check=check,
        status="pass",
        seconds=time.monotonic() - began,
        measured=measured,
    )
