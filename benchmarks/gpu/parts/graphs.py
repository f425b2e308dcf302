"""CUDA graphs of a block and of a stage's job: possible, or the first op that forbids them.

On a CPU the same calls run without a graph, so that this file is tried there too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.cases import StepCase, step_cases
from benchmarks.gpu.parts.alone import batch_of, be_alone, builder, wait
from benchmarks.gpu.parts.steps import planned
from benchmarks.gpu.results import Result, Setting

WARM_UP, REPLAYS = 3, 10


def run(setting: Setting) -> Iterator[Result]:
    """Yield a result for a block's forward and backward, and one for a stage's."""
    be_alone(setting)
    import planner

    case = next(c for c in step_cases(tiny=setting.tiny) if c.name in ("tiny", "llama 8B width"))
    if {"block", "stage"} <= setting.known:
        return
    plan, _ = planned(case, setting)
    engine = planner.apply(plan, builder(case))
    calls = _recorded(engine, case)
    for name in ("block", "stage"):
        if name in setting.known:
            continue
        if name not in calls:
            note = "the engine has no such part any more"
            yield Result(part="graphs", check=name, status="not run", note=note)
            continue
        yield _captured(name, *calls[name], setting)


def _recorded(engine: Any, case: StepCase) -> dict[str, tuple[Any, tuple, dict]]:
    """Return a block and a stage with what they were called with in a step."""
    calls: dict[str, tuple[Any, tuple, dict]] = {}
    stage = next(iter(engine.stages.values()))
    # The class with the most blocks stands in the middle: a layer.
    watched = {"stage": stage, "block": list(stage.blocks)[len(stage.blocks) // 2]}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: (
                calls.setdefault(name, (module, args, kwargs)) and None
            ),
            with_kwargs=True,
        )
        for name, module in watched.items()
    ]
    engine.step(batch_of(case))
    for handle in handles:
        handle.remove()
    return calls


def _captured(name: str, module: Any, args: tuple, kwargs: dict, setting: Setting) -> Result:
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_flatten, tree_map

    def leaf(given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        own = given.detach().clone()
        return own.requires_grad_(given.requires_grad or given.is_floating_point())

    own_args = tree_map(leaf, args)
    params = [param for param in module.parameters() if param.requires_grad]
    given = [t for t in tree_flatten(own_args)[0] if isinstance(t, Tensor) and t.requires_grad]
    calls_with = {k: v for k, v in kwargs.items() if k != "after_first"}

    def work() -> None:
        made = module(*own_args, **calls_with)
        roots = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.grad(
            roots, [*given, *params], [torch.ones_like(t) for t in roots], allow_unused=True
        )

    began = time.monotonic()
    last = _last_op()
    try:
        with last:
            work()  # and its kernels are loaded
        eager_s = _each(work, setting)
        if setting.device == "cuda":
            replay = _graph(work)
        else:
            replay = work
        measured = {"eager_s": eager_s, "replay_s": _each(replay, setting)}
    except Exception as error:
        note = f"after {last.name}: {type(error).__name__}: {error}".splitlines()[0][:300]
        return Result(part="graphs", check=name, status="fail", note=note)
    return Result(
        part="graphs",
        check=name,
        status="pass",
        seconds=time.monotonic() - began,
        measured=measured,
        note=f"{last.count} ops",
    )


def _graph(work: Callable[[], None]) -> Callable[[], Any]:
    """Return what replays work; raise where it can't be captured, with the op that forbids it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    last = _last_op()
    try:
        # (The mode inside the graph: autograd's thread takes it along.)
        with torch.cuda.graph(graph), last:
            work()
    except Exception as error:
        raise RuntimeError(f"{last.name} can't be captured: {error}") from error
    return graph.replay


def _each(work: Callable[[], Any], setting: Setting) -> float:
    work()
    wait(setting.device)
    began = time.perf_counter()
    for _ in range(REPLAYS):
        work()
    wait(setting.device)
    return (time.perf_counter() - began) / REPLAYS


def _last_op() -> Any:
    """Return a mode that counts ops and has the name of the latest."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Last(TorchDispatchMode):
        name, count = "no op", 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.name, self.count = str(func), self.count + 1
            return func(*args, **(kwargs or {}))

    return Last()
