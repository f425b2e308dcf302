"""Blocks compiled beside the same blocks run op by op: a training step on two ranks, in one run.

Each model trains under one plan with either kernels, step by step in turns, from equal weights; a
row has the median step of each, what compiling took before the first step, and how far losses are
apart. `memory` is the most that tensors took in a step of a rank with compiled kernels, over that
with eager ones, as the allocator counts on all threads, and `memory_off` by how much the estimate
of it is off, where that of eager ones is exact; of two ranks that which is more off. With a
`budget` the machine is profiled for each model, its compiled blocks, too, between two such runs,
whose mean is held against it: `eager_off` and `compiled_off` tell by how much predicted steps are
off, `ratio_off` the predicted ratio, and `pace` how much longer eager steps took after the profile
than before: the machine's doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Result, benchmark, in_own_process, note, on_ranks
from costmodel import CostCache
from costmodel.execution import find_execution
from tests.counted import most_bytes, start_count

MODELS = ("gpt", "llama", "vit", "mixtral")
SIZES = {"tiny": (64, 32, 2), "small": (256, 128, 2), "wide": (768, 128, 2)}
"""Width, length of a sequence, layers."""
VOCABULARY = 512
KERNELS = ("eager", "compiled")


@benchmark("compiled", quick={"models": ("gpt",), "size": "tiny", "steps": 2, "layers": 1})
def compiled(
    *,
    models: Annotated[tuple[str, ...], "models"] = MODELS,
    size: Annotated[Literal["tiny", "small", "wide"], "sizes of the models"] = "small",
    layout: Annotated[Literal["dp", "tp", "pp"], "how two ranks share the model"] = "dp",
    recompute: Annotated[Literal["none", "selective", "full"], "of all blocks"] = "none",
    steps: Annotated[int, "steps of each, after two that are not counted"] = 10,
    layers: Annotated[int | None, "layers of the models; as the size says if not given"] = None,
    budget: Annotated[float, "seconds to profile each model in; 0: no predictions"] = 0.0,
) -> Result:
    """Return a row for each model."""
    rows = []
    for name in models:
        note(f"{name}: compiling, then {steps} steps of each")
        shape = (*SIZES[size][:2], layers or SIZES[size][2])
        plans = {"layout": layout, "recompute": recompute}
        with TemporaryDirectory() as scratch:
            told, found = {}, [in_own_process(on_ranks, 2, measure, name, shape, plans, steps)[0]]
            if budget:
                told = in_own_process(predicted, name, shape, plans, budget, scratch)
                found += in_own_process(on_ranks, 2, measure, name, shape, plans, steps)[:1]
        took = {f"{kernels}_ms": mean(row[f"{kernels}_ms"] for row in found) for kernels in KERNELS}
        row = found[-1] | took | {"ratio": took["compiled_ms"] / took["eager_ms"]}
        ranks = in_own_process(on_ranks, 2, memory, name, shape, plans)
        row |= max(ranks, key=lambda rank: abs(rank["memory_off"]))
        for kernels, step_s in told.items():
            row[f"{kernels}_off"] = 1e3 * step_s / row[f"{kernels}_ms"] - 1
        if told:
            row["ratio_off"] = told["compiled"] / told["eager"] / row["ratio"] - 1
            row["pace"] = found[1]["eager_ms"] / found[0]["eager_ms"]
        note(row)
        rows.append(row)
    return Result(rows)


def measure(name: str, shape: tuple[int, int, int], plans: dict[str, str], steps: int) -> Any:
    """Return a model's row; on every rank."""
    from planner.runtime.process.groups.mesh import build_mesh
    from planner.runtime.step.engine import Engine

    source = source_of(name, shape)
    graph, plan = planned(source, plans)
    engines, compile_s = {}, 0.0
    for kernels in KERNELS:
        torch.manual_seed(0)
        own = plan.model_copy(update={"kernels": kernels})
        began_s = time.monotonic()
        mesh = build_mesh(own, torch.device("cpu"))
        engines[kernels] = Engine(own, graph, source.build(), mesh, optimizer=_adamw)
        compile_s = time.monotonic() - began_s
    torch.manual_seed(1)
    batch = source.batch(plan.global_batch)
    took: dict[str, list[float]] = {kernels: [] for kernels in KERNELS}
    apart = 0.0
    for turn in range(steps + 2):
        losses = []
        for kernels in KERNELS if turn % 2 else reversed(KERNELS):
            dist.barrier()
            began_s = time.perf_counter()
            loss = engines[kernels].step(batch)
            seconds = torch.tensor(time.perf_counter() - began_s)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            losses.append(float(loss))
            if turn > 1:
                took[kernels].append(float(seconds))
        apart = max(apart, abs(losses[0] - losses[1]) / abs(losses[0]))
    eager_s, compiled_s = (median(took[kernels]) for kernels in KERNELS)
    return {
        "model": name,
        **plans,
        "eager_ms": 1e3 * eager_s,
        "compiled_ms": 1e3 * compiled_s,
        "compile_s": compile_s,
        "losses_apart": apart,
    }


def predicted(
    name: str, shape: tuple[int, int, int], plans: dict[str, str], budget_s: float, folder: str
) -> dict[str, float]:
    """Return predicted seconds of a step, by kernels, under a profile measured now."""
    from costmodel import estimate
    from planner.language.plan import RUNTIME_OF
    from profiles import measure_profile

    graph, plan = planned(source_of(name, shape), plans)
    profile = measure_profile(
        folder,
        nproc=2,
        device="cpu",
        models=[graph],
        budget_s=budget_s,
        compiled=True,
        progress=lambda part, what: note(f"profile {part:4.0%} {what}"),
    )
    assert profile is not None, "one process measures"
    found = {}
    for kernels in KERNELS:
        own = plan.model_copy(update={"kernels": kernels})
        costs = CostCache(graph, profile, execution=find_execution(RUNTIME_OF[kernels]))
        found[kernels] = estimate(graph, profile, own, costs=costs).step_s
    return found


def memory(name: str, shape: tuple[int, int, int], plans: dict[str, str]) -> dict[str, float]:
    """Return what compiled kernels take of a rank's memory in a step, and how that is told."""
    from costmodel import estimate
    from planner.language.plan import RUNTIME_OF
    from planner.runtime.process.groups.mesh import build_mesh
    from planner.runtime.step.engine import Engine
    from profiles import load_profile

    start_count()
    source = source_of(name, shape)
    graph, plan = planned(source, plans)
    profile = load_profile("h100-sxm5-80gb")  # live bytes are told of tensors alone
    told, rises = {}, {}
    for kernels in KERNELS:
        own = plan.model_copy(update={"kernels": kernels})
        costs = CostCache(graph, profile, execution=find_execution(RUNTIME_OF[kernels]))
        mesh = build_mesh(own, torch.device("cpu"))
        of_ranks = estimate(graph, profile, own, costs=costs).memory
        told[kernels] = float(of_ranks[mesh.rank("pp")].tensor_bytes)
        engine = Engine(own, graph, source.build(), mesh, optimizer=_adamw)
        batch = source.batch(own.global_batch)
        for _ in range(2):
            engine.step(batch)
        rises[kernels] = most_bytes(partial(engine.step, batch), times=4)
        del engine
    taken = told["eager"] + rises["compiled"] - rises["eager"]
    return {"memory": taken / told["eager"], "memory_off": told["compiled"] / taken - 1}


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def planned(source: Any, plans: dict[str, str]) -> tuple[Any, Any]:
    """Return a model's capture and its plan for two ranks."""
    from planner.capture import capture_source
    from planner.language.lowering.defaults import default_plan

    graph = capture_source(source)
    return graph, default_plan(
        graph,
        microbatch_size=4,
        num_microbatches=2,
        recompute=plans["recompute"],  # type: ignore[arg-type]
        **{plans["layout"]: 2},  # type: ignore[arg-type]
    )


def source_of(name: str, shape: tuple[int, int, int]) -> Any:
    """Return a model as a model file's is: how to build it, and its batches."""
    from planner.capture.source.model_file import ModelSource

    length = shape[1]

    def texts(size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (size, length))
        return {"input_ids": ids, "labels": ids}

    def images(size: int) -> dict[str, torch.Tensor]:
        # As many patches of 4 x 4 as there are positions in a text, but for a few.
        side = 4 * int(length**0.5)
        labels = torch.randint(10, (size,))
        return {"pixel_values": torch.randn(size, 3, side, side), "labels": labels}

    build: Callable[[], nn.Module] = lambda: _built(name, shape)  # noqa: E731
    return ModelSource(
        path=Path(f"{name}.py"),
        build=build,
        batch=images if name == "vit" else texts,
        loss=None,
        dependencies=(),
    )


def _built(name: str, shape: tuple[int, int, int]) -> nn.Module:
    import transformers as hf

    width, length, layers = shape
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "intermediate_size": 4 * width,
        "use_cache": False,
    }
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    texts = tokens | {"max_position_embeddings": length}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    match name:
        case "gpt":
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    n_embd=width, n_layer=layers, n_head=8, n_positions=length,
                    use_cache=False, **tokens, **dropout,
                )
            )  # fmt: skip
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **texts, num_key_value_heads=4))
        case "mixtral":
            sizes |= {"num_local_experts": 4, "num_key_value_heads": 4}
            return hf.MixtralForCausalLM(
                hf.MixtralConfig(**sizes | {"intermediate_size": width}, **texts)
            )
        case "vit":
            del sizes["use_cache"]
            side = 4 * int(length**0.5)
            return hf.ViTForImageClassification(
                hf.ViTConfig(**sizes, image_size=side, patch_size=4, num_labels=10)
            )
    raise ValueError(f"{name} is none of {', '.join(MODELS)}")
