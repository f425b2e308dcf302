"""The same Llama block on two ranks: our lowered graph against DTensor's parallelize_module.

Both sides hold the same weights and take the same inputs; gradients are compared before
anything is timed. Each round times both sides, in turns first and second, so that whatever
else the machine does hits both; the figure is the median of the rounds' ratios. A second
comparison is of one process: the user's module in eager mode against the lowered graph with
tp=1. The goals are 1.0 at most and 1.03 at most.

Needs the `transformers` extra. Runs on gloo and the CPU, one thread a rank; with --device
cuda on two GPUs with NCCL.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.harness import Result, benchmark, in_turns, on_ranks
from planner.capture import capture_module
from planner.language.graph import ModelGraph
from planner.language.layout.pieces import piece_of
from planner.language.layout.placement import Placement, Shard, parse_placement
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.lowering.lowering import lower
from planner.language.lowering.propagate import propagate_graph
from planner.runtime.process.collectives import run_step
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.state.weights import read


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the layers and their input, of the rounds, and on which kind of device."""

    hidden: int
    layers: int
    sequence: int
    batch: int
    steps: int
    repeats: int
    device: str


class Layers(nn.Module):
    """Llama's decoder layers alone, with a loss that every output takes part in."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import (
            LlamaDecoderLayer,
            LlamaRotaryEmbedding,
        )

        config = LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.hidden * 11 // 4 // 16 * 16,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_hidden_layers=sizes.layers,
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(sizes.layers))
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        tables = self.rotary(x, positions)
        for layer in self.layers:
            out = layer(x, position_embeddings=tables)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


Step = Callable[[], Tensor]
Gradients = Callable[[], dict[str, Tensor]]


def build(sizes: Sizes, device: torch.device) -> Layers:
    torch.manual_seed(0)
    with device:
        return Layers(sizes)


def lowered(
    model: Layers, graph: ModelGraph, x: Tensor, group: dist.ProcessGroup | None
) -> tuple[Step, Gradients]:
    """The model as a chain of lowered graphs on plain local tensors."""
    tp = 1 if group is None else dist.get_world_size()
    rank = 0 if group is None else dist.get_rank()
    mesh = ProcessMesh(axes=("tp",), shape=(tp,), ranks=tuple(range(tp)))
    batch = x.shape[0]
    layouts = propagate_graph(graph, microbatch_size=batch, axis_size=tp) if tp > 1 else ()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    modules = [
        to_graph_module(
            lower(program.bind(batch), layouts[i] if layouts else None, axis_size=tp),
            {"tp": group},
            x.device,
        )
        for i, program in enumerate(graph.classes)
    ]
    preamble = to_graph_module(graph.preamble.bind(batch), {}, x.device)
    fqn = {t.name: t.fqn for t in graph.tensors}
    local: dict[str, Tensor] = {}
    rests: dict[str, Placement] = {}
    for block in graph.blocks:
        texts = layouts[block.class_index].params if layouts else ("R",) * len(block.params)
        for name, text in zip(block.params, texts, strict=True):
            placement = parse_placement(text)
            piece = own[fqn[name]].detach()
            placed = Placements.of({"tp": placement})
            piece = read(piece_of(piece.shape, placed, mesh, rank, name=fqn[name]), piece)
            piece = piece.clone(memory_format=torch.contiguous_format)
            rests[name] = placement
            local[name] = piece.requires_grad_(graph.tensor[name].requires_grad)
    side_inputs = {n: own[fqn[n]].detach() for n in graph.preamble.params}

    def step() -> Tensor:
        values: dict[str, Tensor] = {graph.batch_inputs[0]: x}
        made = preamble(
            *(values[n] for n in graph.preamble.inputs),
            *(side_inputs[n] for n in graph.preamble.params),
        )
        values |= zip(graph.preamble.outputs, made, strict=True)
        for block in graph.blocks:
            outputs = modules[block.class_index](
                *(values[n] for n in block.inputs), *(local[n] for n in block.params)
            )
            values |= zip(block.outputs, outputs, strict=True)
        loss = values[graph.loss]
        for tensor in local.values():
            tensor.grad = None
        loss.backward()
        return loss.detach()

    def gradients() -> dict[str, Tensor]:
        found = {}
        for name, tensor in local.items():
            if tensor.grad is not None:
                found[fqn[name]] = tensor.grad
                if group is not None and isinstance(rests[name], Shard):
                    gather = ("all_gather", rests[name], 0)
                    found[fqn[name]] = run_step(tensor.grad, group.group_name, gather)
        return found

    return step, gradients


def with_dtensor(model: Layers, x: Tensor) -> tuple[Step, Gradients]:
    """PyTorch's own way: column and row parallel modules on DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(x.device.type, (dist.get_world_size(),))
    by_column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    plan = dict.fromkeys((*by_column, "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    plan |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return in_eager_mode(model, x)


def in_eager_mode(model: nn.Module, x: Tensor) -> tuple[Step, Gradients]:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(x)
        loss.backward()
        return loss.detach()

    def gradients() -> dict[str, Tensor]:
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}

    return step, gradients


def seconds_per_step(step: Step, steps: int, device: torch.device) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compare(
    sides: dict[str, tuple[Step, Gradients]], sizes: Sizes, device: torch.device
) -> list[list[float]]:
    """Check that two sides agree, then time them in turns; return the seconds of each."""
    (first, first_grads), (second, second_grads) = sides.values()
    torch.testing.assert_close(first(), second(), rtol=1e-5, atol=1e-6)
    ours, theirs = first_grads(), second_grads()
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-5)
    for step in (first, second):
        seconds_per_step(step, 3, device)
    timed = {
        "ours": lambda: seconds_per_step(first, sizes.steps, device),
        "theirs": lambda: seconds_per_step(second, sizes.steps, device),
    }
    return list(in_turns(timed, sizes.repeats).values())


def compare_on_ranks(sizes: Sizes) -> list[list[float]]:
    """On a rank: the lowered graph beside DTensors, or alone beside the module in eager mode."""
    index = dist.get_rank() if sizes.device == "cuda" else None
    device = torch.device(sizes.device, index)
    generator = torch.Generator().manual_seed(1)
    shape = (sizes.batch, sizes.sequence, sizes.hidden)
    x = torch.randn(shape, generator=generator).to(device)
    model, other = build(sizes, device), build(sizes, device)
    graph = capture_module(
        model, (x[:1].expand(2, -1, -1),), (x[:1].expand(3, -1, -1),), name="llama-layers"
    )
    alone = dist.get_world_size() == 1
    sides = {
        "lowered": lowered(model, graph, x, None if alone else dist.group.WORLD),
        "other": in_eager_mode(other, x) if alone else with_dtensor(other, x),
    }
    return compare(sides, sizes, device)


@benchmark("lowering", quick={"hidden": 64, "layers": 1, "sequence": 16, "steps": 2, "repeats": 2})
def lowering(
    *,
    hidden: int = 512,
    layers: int = 2,
    sequence: int = 256,
    batch: int = 2,
    steps: int = 10,
    repeats: Annotated[int, "rounds"] = 9,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Result:
    sizes = Sizes(
        hidden=hidden, layers=layers, sequence=sequence, batch=batch,
        steps=steps, repeats=repeats, device=device,
    )  # fmt: skip
    backend = "nccl" if device == "cuda" else "gloo"
    rows = []
    for ranks, title in (
        (2, "tp=2, lowered against DTensor"),
        (1, "one device, lowered against eager"),
    ):
        ours, theirs = on_ranks(ranks, compare_on_ranks, sizes, backend=backend)[0]
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        rows.append(
            {
                "what": title,
                "ratio": statistics.median(ratios),
                "least_ratio": ratios[0],
                "highest_ratio": ratios[-1],
                "lowered_s": statistics.median(ours),
                "other_s": statistics.median(theirs),
            }
        )
    return Result(rows)
