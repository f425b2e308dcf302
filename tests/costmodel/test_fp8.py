"""N10, X10: products in 8 bits in the model of time, by the rates of a device, and of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from costmodel import CostCache, estimate
from costmodel.execution.executed import in_training
from costmodel.time.block.compute import op_seconds
from costmodel.time.communication import DataParallelSeconds, data_parallel_seconds
from costmodel.time.stage_costs.replicas import replica_prices
from planner.errors import LayoutError
from planner.language.graph import Op, Ref, TensorMeta
from planner.language.layout.axes import Degrees
from planner.language.lowering.defaults import default_plan
from planner.language.ops.families.products.narrow import narrow_op, plain_op, scaling_of
from planner.language.plan.replication import Replication
from planner.runtime.proofs.dryrun import dry_run
from profiles import Group, load_profile
from search.request import SearchRequest
from search.space.request_checks import validate_request
from tests.builders import PlainGPT, gpt_batch
from tests.captures import capture_module
from tests.cpu_profile import CpuProfile
from tests.experts import RoutedGPT


def linear(rows: int, columns: int, inner: int) -> tuple[Op, dict[str, TensorMeta]]:
    """A linear layer in bf16 of which x and the weight need gradients."""
    shapes = {"x": (rows, inner), "w": (columns, inner), "y": (rows, columns)}
    metas = {
        name: TensorMeta(
            name=name, shape=shape, dtype="bfloat16", requires_grad=True,
            kind="param" if name == "w" else "activation",
        )
        for name, shape in shapes.items()
    }  # fmt: skip
    op = Op(name="y", target="aten.linear.default", args=(Ref("x"), Ref("w")), outputs=("y",))
    return op, metas


def seconds(op: Op, metas: dict[str, TensorMeta], device: str, kernels="eager") -> float:
    return sum(op_seconds(op, metas, in_training(load_profile(device), 8), kernels=kernels))


@pytest.mark.parametrize(
    ("scaling", "device"),
    [
        ("rowwise", "h100-sxm5-80gb"),
        ("tensorwise", "h100-sxm5-80gb"),
        ("blocks", "b200-sxm"),
    ],
)
def test_large_layers_gain_and_small_ones_lose(scaling, device):
    """At twice the rate three products of 8192 gain more than casts take; of 512 they do not."""
    for size, is_faster in ((8192, True), (512, False)):
        op, metas = linear(8192, size, size)
        narrow = narrow_op(op, scaling)
        assert narrow is not None
        assert scaling_of(narrow) == scaling
        assert plain_op(narrow) == op
        plain_s = seconds(op, metas, device)
        eager_s, compiled_s = (
            seconds(narrow, metas, device, kernels) for kernels in ("eager", "fused")
        )
        assert compiled_s < eager_s
        assert (eager_s < plain_s) == is_faster


def test_experts_of_many_rows_gain_and_those_of_few_lose():
    """Casts of a matrix are the same however many rows its run has."""
    for rows, is_faster in ((65536, True), (2048, False)):
        op, metas = linear(rows, 14336, 4096)
        runs = replace(op, target="planner.grouped_mm", args=(Ref("x"), Ref("w"), Ref("ends")))
        metas["w"] = replace(metas["w"], shape=(8, 4096, 14336))
        metas["ends"] = replace(
            metas["x"], name="ends", shape=(8,), dtype="int32", requires_grad=False
        )
        narrow = narrow_op(runs, "rowwise")
        assert narrow is not None
        assert plain_op(narrow) == runs
        assert narrow_op(runs, "tensorwise") is None
        plain_s, narrow_s = (
            seconds(each, metas, "h100-sxm5-80gb", "fused") for each in (runs, narrow)
        )
        assert (narrow_s < plain_s) == is_faster
        assert 0.5 < narrow_s / plain_s < 2


def test_no_product_is_faster_than_twice():
    op, metas = linear(65536, 16384, 16384)
    narrow = narrow_op(op, "tensorwise")
    assert narrow is not None
    plain_s, narrow_s = (seconds(each, metas, "h100-sxm5-80gb", "fused") for each in (op, narrow))
    assert 0.5 < narrow_s / plain_s < 0.8


def test_a_device_without_a_rate_is_refused():
    graph = fp8_graph(Wide())
    request = SearchRequest(num_devices=2, global_batch=32, precision="fp8")
    validate_request(request, graph, load_profile("h100-sxm5-80gb").cluster)
    with pytest.raises(LayoutError, match="has no rate of products of 8-bit floats"):
        validate_request(request, graph, load_profile("a100-sxm4-80gb").cluster)
    in_blocks = replace(request, precision="mxfp8")
    validate_request(in_blocks, graph, load_profile("b200-sxm").cluster)
    with pytest.raises(LayoutError, match="8-bit floats with a scale for 32 neighbours, which"):
        validate_request(in_blocks, graph, load_profile("h100-sxm5-80gb").cluster)


class Wide(nn.Module):
    """Layers whose casts are the height of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).float().square().mean()


def wide_batch(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(size, 16, 64, dtype=torch.bfloat16)}


class GPT(PlainGPT):
    """Of two layers."""

    def __init__(self) -> None:
        super().__init__(layers=2)


def fp8_graph(model: nn.Module, precision="fp8"):
    batch = wide_batch if isinstance(model, Wide) else gpt_batch
    return capture_module(model, batch(2), batch(3), precision=precision)


class Routed(RoutedGPT):
    """Of experts whose casts are the height of a step, or the buffers in which they lie in runs."""

    def __init__(self) -> None:
        super().__init__(width=512)


CASES = [
    (Wide, {}),
    (Wide, {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"}),
    (Wide, {"precision": "mxfp8"}),
    (GPT, {"precision": "mxfp8", "recompute": "selective"}),
    (GPT, {"dp": 2, "zero_stage": 3}),
    (GPT, {"recompute": "selective"}),
    (Routed, {}),
    (Routed, {"recompute": "selective"}),
]


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=str)
def test_predicted_tensors_are_those_of_the_dry_run(kind, layout):
    """Within 1% on every pp rank, casts ahead of products among them."""
    layout = dict(layout)
    precision = layout.pop("precision", "fp8")
    graph = fp8_graph(kind(), precision)
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, **{"microbatch_size": 8, "num_microbatches": 2, **layout})
    plan = plan.model_copy(update={"precision": precision})
    predicted = estimate(graph, costs.profile, plan, costs=costs).memory
    for pp_rank in range(plan.pp):
        rank = (pp_rank + 1) * plan.world_size // plan.pp - 1
        run = dry_run(plan, graph, kind, rank=rank, on_gloo=True)
        error = float(predicted[pp_rank].tensor_bytes) / run.peak_bytes - 1
        assert abs(error) < 0.01, f"pp rank {pp_rank}: {error:+.2%}"


def test_gathers_in_8_bits_send_half_and_cast():
    """By hand, of ZeRO 3 on two nodes: 2**26 numbers, all of them weights in 8 bits."""
    profile, numbers = load_profile("h100-sxm5-80gb"), 2**26
    group = Group(ranks_per_node=1, num_nodes=2)
    replication = Replication(replicas=2, zero_stage=3, precision="fp8-tensorwise")

    def seconds(narrow_bytes: float) -> DataParallelSeconds:
        return data_parallel_seconds(
            profile, group, replication, param_bytes=2.0 * numbers, num_blocks=1, num_tensors=3,
            narrow_bytes=narrow_bytes,
        )  # fmt: skip

    def sent(kind: str, num_bytes: float) -> float:
        return profile.collective_seconds(kind, num_bytes, group).seconds

    wide, narrow = seconds(0.0), seconds(2.0 * numbers)
    cast_s = numbers * (9 / 2 + 3 + 4) / profile.cluster.memory_bytes_per_s
    gained_s = sent("all_gather", 2 * numbers) - sent("all_gather", numbers)
    expected = gained_s - sent("all_reduce", 6) - cast_s
    assert wide.forward_s - narrow.forward_s == pytest.approx(expected)
    assert wide.backward_s - narrow.backward_s == pytest.approx(expected)
    assert narrow.forward_s < wide.forward_s


def test_gathers_in_8_bits_are_for_links_that_few_share_and_no_bound_is_above_them():
    profile = load_profile("h100-sxm5-80gb")
    graphs = {p: fp8_graph(Wide(), p) for p in ("fp8", "fp8-tensorwise")}
    gathered = {}
    for precision, graph in graphs.items():
        for nodes, tp in ((1, 1), (1, 2), (2, 1), (2, 2)):
            costs = CostCache(graph, profile)
            replication = Replication(replicas=8 * nodes // tp, zero_stage=3, precision=precision)
            prices = replica_prices(costs, replication, Degrees(tp=tp))
            gathered[precision, nodes, tp] = prices.gathers_narrow
            if not prices.gathers_narrow:
                continue
            least = prices.least_s_per_byte(1e8, 4)
            for narrow in (0.0, 5e7, 1e8):
                found, _ = prices.of_stages(
                    *(np.array([value]) for value in (4e8, 4.0, 12.0)),
                    narrow=np.array([4 * narrow]),
                )
                assert least.forward_s * 4e8 <= found.forward_s[0] * (1 + 1e-9)
                assert least.backward_s * 4e8 <= found.backward_s[0] * (1 + 1e-9)
    assert [key for key, on in gathered.items() if on] == [("fp8-tensorwise", 2, 2)]


def test_predicted_tensors_are_those_of_the_dry_run_with_gathers_in_8_bits():
    graph = fp8_graph(GPT(), "fp8-tensorwise")
    plan = default_plan(graph, dp=2, zero_stage=3, microbatch_size=8, num_microbatches=2)
    cluster = plan.cluster.model_copy(update={"devices_per_node": 1})
    plan = plan.model_copy(update={"precision": "fp8-tensorwise", "cluster": cluster})
    predicted = estimate(graph, CpuProfile(), plan).memory[0]
    run = dry_run(plan, graph, GPT, rank=1, on_gloo=True)
    assert abs(float(predicted.tensor_bytes) / run.peak_bytes - 1) < 0.01
