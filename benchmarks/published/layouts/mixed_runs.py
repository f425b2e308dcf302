"""Sailor's measured runs on GH200s and on mixed devices: how well layouts of a model are ranked.

Each row of `hetero_runs.csv` becomes a plan with the stages, groups of devices and replicas that it
names, and is priced by `estimate` as Megatron-DeepSpeed without fused attention, in two ways:

    sheet      blocks from the device's data sheet and published runs; for GH200 alone
    layers     blocks as `layer_profiles.csv` has them, measured one by one on the kind of device,
               their collectives on tp included; all else, exchange and transfers, as before

Nodes of the mixed cluster are linked by what their all-reduces ran at (`LAN_GB_PER_S`), their
gradients summed in fp32, with which all six tell one rate. Its rows say the kinds of a stage's
replicas and not how many are of each: as many, the first with those left over. Left out: rows whose
step time is the copy of another cell. Rows do not tell the dtype, the recomputation and the version
of the code, so ranks are of more worth than errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED, records_of
from benchmarks.published.groups import kendall_tau
from costmodel.cache import BlockPrice, CostCache, costs_of_groups
from costmodel.estimate import step_seconds as predicted_seconds
from costmodel.execution.executed import ExecutedProfile
from costmodel.table.kernels import DeviceRates
from costmodel.table.rows.row_plan import plan_of, transformer_of
from costmodel.table.rows.rows import run_of
from costmodel.table.rows.run_row import RunRow
from costmodel.time.stage_costs.times import RunTimes
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.language.templates import build_transformer
from planner.units import GB
from profiles import Profile
from profiles.profile import DeviceGroup, GroupedProfile
from profiles.records import TierRecord

MODELS = {
    "OPT-350": {"layers": "24", "hidden": "1024", "heads": "16", "vocab": "50272"},
    "GPT-NEO": {"layers": "32", "hidden": "2560", "heads": "20", "vocab": "50257"},
}
"""Configurations of facebook/opt-350m and EleutherAI/gpt-neo-2.7B."""

LAYERS_OF = {"OPT-350": "OPT-350", "GPT-NEO": "GPT-Neo-2.7"}
"""Names of the models in the file of layers."""

GPUS = {"GH-96": "GH200"}
"""Devices with a data sheet here. Others are of the mixed cluster: their links are an RTX 3090's,
their layers measured.
"""

DEVICES_PER_NODE = {"clariden": 4, "mit": 8}

LAN_GB_PER_S = 0.098
"""Of a node of the mixed cluster: fp32 gradients of 331 million parameters, 2 (n - 1) / n of them,
in 21.6 s on n = 4 nodes and 22.6 s on 6 (`grad_allreduce_s`): a port of 1 Gb/s at 78%. The other
rows' are 0.104 to 0.115; their sums in fp16 would be half a port.
"""

Layers = dict[tuple[str, str, int, int], dict[int, tuple[float, float]]]
"""Forward and backward seconds by first layer; by model, device, microbatch size and tp."""


def load_layers(path: Path) -> Layers:
    """Read the file of measured layers."""
    layers: Layers = defaultdict(dict)
    for row in records_of(path):
        key = row["model"], row["gpu"], int(row["micro_batch"]), int(row["tp"])
        first = int(row["first_layer_index"])
        layers[key][first] = float(row["fwd_s"]), float(row["bwd_s"])
    return layers


class MeasuredLayers(CostCache):
    """Prices whose blocks take what was measured of them on one kind of device."""

    def __init__(
        self, graph: ModelGraph, profile: Profile, run: RunRow, measured: Mapping[int, Any]
    ) -> None:
        super().__init__(graph, profile, execution=run.stack)
        self._measured = measured

    def block(self, class_index: int, *sizes: Any, **choices: Any) -> BlockPrice:
        """Return the price of one block: its bytes are the model's, its seconds measured."""
        price = super().block(class_index, *sizes, **choices)
        index = next(b.index for b in self.graph.blocks if b.class_index == class_index)
        # Of the layers between the first and the last one stands for all.
        forward_s, backward_s = self._measured[max(at for at in self._measured if at <= index)]
        times = RunTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            forward_flop=price.times.forward_flop,
            backward_flop=price.times.backward_flop,
        )
        return price._replace(times=times)


def refusal(row: Mapping[str, str], layers: Layers | None) -> str | None:
    """Return why a row is not priced, or nothing."""
    if row["iteration_s"] == row["grad_allreduce_s"]:
        return "its step time is that of its all-reduce"
    blocks = sum(int(number) for number in row["layers_per_stage"].split("|"))
    if blocks != int(MODELS[row["model"]]["layers"]) + 2:
        return "its stages are not the model's layers with embedding and head"
    kinds = set(row["gpu_types"].replace("+", "|").split("|"))
    if layers is None and not kinds <= set(GPUS):
        return "no data sheet of its devices"
    sizes = int(row["micro_batch"]), int(row["tp"].partition("|")[0])
    if layers is not None and any(
        (LAYERS_OF[row["model"]], kind, *sizes) not in layers for kind in kinds
    ):
        return "no layers measured at its sizes"
    return None


def step_seconds(row: Mapping[str, str], layers: Layers | None) -> float:
    """Return the estimated step of a row."""
    kinds = row["gpu_types"].replace("+", "|").split("|")
    said = {
        **MODELS[row["model"]],
        "stack": "megatron-classic",
        "gpu": GPUS.get(kinds[0], "RTX 3090"),
        "gpus": row["gpus"],
        "seq_len": "2048",
        "dtype": "fp16",
        "zero_stage": "0",
        "recompute": "none",
        "tp": row["tp"].partition("|")[0],
        "pp": row["pp"],
        "dp": row["dp"].partition("|")[0],
        "vpp": "1",
        "micro_batch": row["micro_batch"],
        "global_batch": row["global_batch"],
    }
    run, profile, rates = run_of(said)
    per_node = min(DEVICES_PER_NODE[row["cluster"]], run.gpus // int(row["nodes"]))
    model = transformer_of(run)
    graph = build_transformer(model)
    plan = _with_stages(
        plan_of(run, model, devices_per_node=per_node),
        [int(number) for number in row["layers_per_stage"].split("|")],
    )
    cluster = profile.file.cluster.model_copy(update={"devices_per_node": per_node})
    profile = Profile(profile.file.model_copy(update={"cluster": cluster}))
    if layers is None:
        executed = _executed(profile, rates, run, per_node)
        return predicted_seconds(plan, CostCache(graph, executed, execution=run.stack))
    measured = {
        kind: layers[LAYERS_OF[row["model"]], kind, run.micro_batch, run.tp] for kind in kinds
    }
    if row["cluster"] == "clariden":
        executed = _executed(profile, rates, run, per_node)
        costs: CostCache = MeasuredLayers(graph, executed, run, measured[kinds[0]])
        return predicted_seconds(plan, costs)
    # Nothing is lost on the way but what the rate has lost already.
    rates = replace(rates, network_efficiency=1.0)
    run = replace(run, stack=replace(run.stack, reduced_bytes=4))
    groups = [
        DeviceGroup(name=name, profile=_on_lan(profile, name, devices), num_devices=devices)
        for stage in _placed(row, run)
        for name, devices in stage
    ]

    def on(profile: Profile) -> CostCache:
        kind = profile.name.rpartition("@")[2].partition(" ")[2]
        executed = _executed(profile, rates, run, per_node)
        return MeasuredLayers(graph, executed, run, measured[kind])

    costs = costs_of_groups(GroupedProfile("mixed", groups), on)
    stages = tuple(
        stage.model_copy(update={"device_group": "+".join(name for name, _ in places)})
        for stage, places in zip(plan.stages, _placed(row, run), strict=True)
    )
    return predicted_seconds(plan.model_copy(update={"stages": stages}), costs)


def _executed(profile: Profile, rates: DeviceRates, run: RunRow, per_node: int) -> ExecutedProfile:
    num_nodes = -(-run.gpus // per_node)
    return ExecutedProfile(profile, rates, num_nodes=num_nodes, execution=run.stack)


def _placed(row: Mapping[str, str], run: RunRow) -> Iterator[list[tuple[str, int]]]:
    """Yield for each stage its groups, "stage kind", and their devices."""
    for stage, kinds in enumerate(row["gpu_types"].split("|")):
        names = kinds.split("+")
        each, over = divmod(run.dp, len(names))
        yield [
            (f"{stage} {name}", (each + (place < over)) * run.tp)
            for place, name in enumerate(names)
        ]


def _on_lan(profile: Profile, name: str, devices: int) -> Profile:
    """Return the profile of a group whose nodes, and which itself, the local network links."""
    record = profile.file.cluster
    rate = LAN_GB_PER_S * GB / record.devices_per_node
    beta = record.inter_node.beta_s_per_byte.model_copy(update={"value": 1 / rate})
    link = record.inter_node.model_copy(update={"beta_s_per_byte": beta})
    cluster = record.model_copy(
        update={"inter_node": link, "tiers": (TierRecord(devices=devices, link=link),)}
    )
    named = {"name": f"{profile.name}@{name}", "cluster": cluster}
    return Profile(profile.file.model_copy(update=named))


def _with_stages(plan: Plan, blocks: list[int]) -> Plan:
    """Return a plan whose stages have so many blocks."""
    ends = np.cumsum(blocks)
    stages = tuple(
        stage.model_copy(update={"first_block": int(end - size), "last_block": int(end - 1)})
        for stage, end, size in zip(plan.stages, ends, blocks, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def _ordered(groups: list[list[tuple[float, float]]]) -> tuple[int, int]:
    """Return how many pairs of layouts of a group are in their measured order, and how many are."""
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    right = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    return right, sum(a[1] != b[1] for a, b in pairs)


@benchmark("mixed_runs", quick={})
def mixed_runs(
    *,
    rows: Path = PUBLISHED / "hetero_runs.csv",
    layers: Path = PUBLISHED / "layer_profiles.csv",
    ways: Annotated[tuple[str, ...], "how blocks are priced"] = ("sheet", "layers"),
) -> Result:
    refused: dict[str, int] = defaultdict(int)
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    runs = records_of(rows)
    for way in ways:
        measured_layers = load_layers(layers) if way == "layers" else None
        for row in runs:
            if (why := refusal(row, measured_layers)) is not None:
                refused[f"{way}: {why}"] += 1
                continue
            names = "branch", "cluster", "model", "gpus", "global_batch"
            pair = step_seconds(row, measured_layers), float(row["iteration_s"])
            groups[way, *(row[name] for name in names)].append(pair)
    lines = []
    for (way, branch, cluster, model, gpus, batch), pairs in groups.items():
        predicted, measured = np.array(pairs).T
        ranked = len(pairs) > 1
        regret = 100 * float(measured[predicted.argmin()] / measured.min() - 1)
        lines.append(
            {
                "way": way,
                "branch": branch,
                "cluster": cluster,
                "model": model,
                "gpus": int(gpus),
                "batch": int(batch),
                "layouts": len(pairs),
                "kendall_tau": kendall_tau(predicted, measured) if ranked else None,
                "regret_pct": regret if ranked else None,
                "median_ratio": float(np.median(predicted / measured)),
            }
        )
    notes = []
    for way, cluster in dict.fromkeys((key[0], key[2]) for key in groups):
        own = [pairs for key, pairs in groups.items() if (key[0], key[2]) == (way, cluster)]
        right, of_all = _ordered(own)
        ratios = [predicted / measured for pairs in own for predicted, measured in pairs]
        spread = f"{np.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        notes.append(
            f"{way}, {cluster}: {right} of {of_all} pairs in order; predicted/measured {spread}"
        )
    notes += [f"not priced: {count:3}  {why}" for why, count in sorted(refused.items())]
    return Result(lines, notes)
