"""One rank of `ranks`: trains each case beside one process, and says how far they are apart."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

MESSAGE_STEPS = 5


def main() -> None:
    """Train the cases of the first argument; rank 0 appends a line for each to the second."""
    cases, answers = json.loads(sys.argv[1]), Path(sys.argv[2])
    import torch

    # Each model is exported once for all ranks and cases.
    import planner.capture
    import planner.capture.module
    from tests import captures

    planner.capture.capture_module = captures.capture_module
    planner.capture.module.capture_module = captures.capture_module
    torch.set_num_threads(1)
    own = {"messages": _messages, "decoder": _bytes}
    for case in cases:
        found = own.get(case["model"], _gaps)(case)
        import torch.distributed as dist

        if dist.get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps(found) + "\n")


def _plan(case: dict[str, Any], model: str) -> Any:
    import torch

    from planner.language.lowering.defaults import default_plan
    from tests.runtime.scenarios import capture

    return default_plan(capture(model, torch.float64), **case["choices"])


def _gaps(case: dict[str, Any]) -> dict[str, float]:
    from tests.runtime.scenarios import train_beside_one_process

    gaps = train_beside_one_process(case["model"], _plan(case, case["model"])).gaps
    return {"loss_gap": gaps.loss, "gradient_gap": gaps.gradient, "param_gap": gaps.parameter}


def _messages(case: dict[str, Any]) -> dict[str, float]:
    """Host time of a message's send and receive, by the functions that do them."""
    import planner
    from planner.runtime.step.messages import p2p
    from tests.runtime.scenarios import build

    tiny, module = build("small-gpt")
    plan = _plan(case, "small-gpt")
    engine = planner.apply(plan, module.double())
    batch = tiny.batch(plan.global_batch)
    engine.step(batch)
    spent = {name: _Timed(p2p.Post, name) for name in ("put", "_receive")}
    for _ in range(MESSAGE_STEPS):
        engine.step(batch)
    return {f"message {name}_s": timed.each_s for name, timed in spent.items() if timed.count}


def _bytes(case: dict[str, Any]) -> dict[str, float]:
    """Bytes of tensors in a step in bfloat16, on this rank: predicted, and measured on a GPU."""
    import torch

    import planner
    from benchmarks.gpu.cases import LLAMA_1B, SHIPPED, TINY, StepCase, graph_of, predicted
    from benchmarks.gpu.parts.alone import builder
    from benchmarks.gpu.parts.ranks import SAID
    from planner.language.lowering.defaults import default_plan
    from planner.language.plan import Plan
    from profiles import load_profile

    torch.set_default_dtype(torch.float32)  # (Cases before this one train in fp64.)
    on_gpu = os.environ["PLANNER_DEVICE"] == "cuda"
    sizes = LLAMA_1B | {"width": 1024, "layers": 4, "ffn": 4096} if on_gpu else TINY
    model = StepCase(name="decoder", sizes=sizes, sequence=1024 if on_gpu else 32)
    graph = graph_of(model)
    plan = default_plan(graph, **case["choices"]).model_copy(update={"precision": "bf16"})
    plan = Plan.model_validate(plan.model_dump())
    found = {f"{SAID}tensor_bytes": predicted(plan, graph, load_profile(SHIPPED))["tensor_bytes"]}
    engine = planner.apply(plan, builder(model))
    from benchmarks.gpu.decoder import batch

    torch.manual_seed(0)  # every rank is given the same batch
    whole = batch(plan.global_batch, model.sequence)
    engine.step(whole)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    engine.step(whole)
    if on_gpu:
        torch.cuda.synchronize()
        found["tensor_bytes"] = float(torch.cuda.memory_stats()["active_bytes.all.peak"])
    return found


class _Timed:
    """Adds up what calls of a method take."""

    def __init__(self, owner: type, name: str) -> None:
        self.count, self.total_s = 0, 0.0
        method: Callable[..., Any] | None = getattr(owner, name, None)
        if method is None:
            return

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.count += 1
                self.total_s += time.perf_counter() - began

        setattr(owner, name, timed)

    @property
    def each_s(self) -> float:
        return self.total_s / self.count


if __name__ == "__main__":
    main()
