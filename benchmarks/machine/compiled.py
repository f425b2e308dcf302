"""Blocks compiled beside the same blocks run op by op: a training step on two ranks, in one run.

Each model trains under one plan with either kernels, step by step in turns, from equal weights; a
row has the median step of each, what compiling took before the first step, and how far losses are
apart. `peak` is the most that live tensors take in a dry run of the plan with compiled kernels,
over that with eager ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import Result, benchmark, in_own_process, note, on_ranks

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
) -> Result:
    """Return a row for each model."""
    rows = []
    for name in models:
        note(f"{name}: compiling, then {steps} steps of each")
        shape = (*SIZES[size][:2], layers or SIZES[size][2])
        plans = {"layout": layout, "recompute": recompute}
        found = in_own_process(on_ranks, 2, measure, name, shape, plans, steps)
        row = found[0] | {"peak": in_own_process(peak_ratio, name, shape, plans)}
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
        engines[kernels] = Engine(
            own, graph, source.build(), mesh, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)
        )
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
        "ratio": compiled_s / eager_s,
        "compile_s": compile_s,
        "losses_apart": apart,
    }


def peak_ratio(name: str, shape: tuple[int, int, int], plans: dict[str, str]) -> float:
    """Return the peak of rank 0's live bytes with compiled kernels, over that with eager ones."""
    from planner.runtime.proofs.dryrun import dry_run

    source = source_of(name, shape)
    graph, plan = planned(source, plans)
    eager, other = (
        dry_run(plan.model_copy(update={"kernels": kernels}), graph, source.build).peak_bytes
        for kernels in KERNELS
    )
    return other / eager


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
    from pathlib import Path

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
