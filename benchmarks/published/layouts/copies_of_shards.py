"""HSDP beside ZeRO over all replicas, where published runs chose between them.

Prices runs that are published with their sharding at every number of copies of the shards, on
links of several rates: what the fastest that fits wins over one copy (FSDP), and over a copy in
each node. Sources: the table in the README of foundation-model-stack/fms-fsdp (Llama 2 on 128
A100, gradients summed in bf16; its configuration guide takes a copy in each node where the model
fits that), and torchtitan's table of December 2024 (Llama 3.1 8B on 128 H100, one copy, gradients
summed in fp32). Llama 3's paper (arXiv 2407.21783, table 4) has one copy, too.

What to expect: with one copy a node sends 2 b + g a microbatch, b bytes of weights gathered twice
and g of gradients scattered; with a copy in each node 2 g a step, the all-reduce of gradients. That
is as much with one microbatch and g = 2 b (fp32), two thirds with g = b (bf16), and less with
several microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from benchmarks.harness import Result, benchmark
from costmodel.cache import CostCache
from costmodel.estimate import estimate
from costmodel.execution.executed import ExecutedProfile
from costmodel.table.rows.row_plan import plan_of, transformer_of
from costmodel.table.rows.rows import device_bytes, run_of
from planner.language.layout.axes import Degrees
from planner.language.templates import build_transformer
from profiles import Profile

DEVICES_PER_NODE = 8
GIGABIT = 1e9 / 8  # bytes


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run of data parallelism alone."""

    name: str
    """The model."""
    sizes: dict[str, str]
    """Fields of a row that say its sizes."""
    gpu: str
    """The device, as rows name it."""
    micro_batch: int
    """Samples of a device and microbatch."""
    recompute: str
    """As rows name it."""
    sum_bytes: int
    """Of a gradient's element on the wire."""
    copies: int
    """Copies of the shards that the run had."""
    tokens_per_s: float
    """Measured, of each device."""
    gpus: int = 128
    """Devices of the run."""
    seq_len: int = 4096
    """Positions of a sample."""


def _llama(layers: int, hidden: int, kv_heads: int, ffn: int, vocab: int = 32000) -> dict[str, str]:
    heads = hidden // 128
    fields = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    fields |= {"ffn_hidden": ffn, "gated_ffn": 1, "vocab": vocab}
    return {name: str(value) for name, value in fields.items()}


RUNS = (
    Published(
        name="Llama 2 7B", sizes=_llama(32, 4096, 32, 11008), gpu="A100-SXM", micro_batch=2,
        recompute="none", sum_bytes=2, copies=16, tokens_per_s=3760,
    ),
    Published(
        name="Llama 2 13B", sizes=_llama(40, 5120, 40, 13824), gpu="A100-SXM", micro_batch=1,
        recompute="none", sum_bytes=2, copies=16, tokens_per_s=1700,
    ),
    Published(
        name="Llama 2 34B", sizes=_llama(48, 8192, 8, 22016), gpu="A100-SXM", micro_batch=8,
        recompute="full", sum_bytes=2, copies=1, tokens_per_s=772,
    ),
    Published(
        name="Llama 2 70B", sizes=_llama(80, 8192, 8, 28672), gpu="A100-SXM", micro_batch=6,
        recompute="full", sum_bytes=2, copies=1, tokens_per_s=380,
    ),
    Published(
        name="Llama 3.1 8B", sizes=_llama(32, 4096, 8, 14336, 128256),
        gpu="H100-SXM (96GB HBM2e, 500W)", micro_batch=2, recompute="selective", sum_bytes=4,
        copies=1, tokens_per_s=5605, seq_len=8192,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Line:
    """A run at one rate between nodes."""

    name: str
    gigabit_per_s: float
    """Of a device between nodes."""
    published_copies: int
    fastest_copies: int
    """Of those that fit."""
    wins_pct: float
    """By how much a step of the fastest is shorter than with one copy."""
    in_nodes_wins_pct: float | None
    """The same of a copy in each node; None where that does not fit."""
    tokens_per_s: float
    """Of each device with the copies that the run had."""
    published_tokens_per_s: float


def priced(run: Published, gigabit_per_s: float | None) -> Line:
    """Return a run at each number of copies, between nodes at this rate or the profile's own."""
    row = {
        **run.sizes,
        "stack": "fsdp-flash",
        "gpu": run.gpu,
        "gpu_mem_gb": "80" if run.gpu.startswith("A100") else "96",
        "gpus": str(run.gpus),
        "seq_len": str(run.seq_len),
        "dtype": "bf16",
        "zero_stage": "3",
        "recompute": run.recompute,
        "tp": "1",
        "pp": "1",
        "vpp": "1",
        "dp": str(run.gpus),
        "micro_batch": str(run.micro_batch),
        "global_batch": str(run.micro_batch * run.gpus),
    }
    parsed, profile, rates = run_of(row)
    profile = _between_nodes(profile, gigabit_per_s)
    stack = replace(parsed.stack, reduced_bytes=run.sum_bytes)
    num_nodes = run.gpus // DEVICES_PER_NODE
    executed = ExecutedProfile(profile, rates, num_nodes=num_nodes, execution=stack)
    model = transformer_of(parsed)
    costs = CostCache(build_transformer(model), executed, execution=stack)
    plan = plan_of(parsed, model, devices_per_node=DEVICES_PER_NODE)
    limit = device_bytes(row, profile)
    step_s: dict[int, float] = {}
    fit: list[int] = []
    for copies in (2**power for power in range(num_nodes.bit_length())):
        degrees = Degrees(rp=copies, dp=run.gpus // copies)
        found = estimate(
            costs.graph, profile, plan.model_copy(update={"degrees": degrees}), costs=costs
        )
        step_s[copies] = found.step_s
        if max(float(parts.tensor_bytes) for parts in found.memory) <= limit:
            fit.append(copies)
    fastest = min(fit or [1], key=lambda copies: step_s[copies])

    def wins_pct(copies: int) -> float:
        return 100 * (1 - step_s[copies] / step_s[1])

    return Line(
        name=run.name,
        gigabit_per_s=8e-9 / profile.cluster.inter_node.beta_s_per_byte,
        published_copies=run.copies,
        fastest_copies=fastest,
        wins_pct=wins_pct(fastest),
        in_nodes_wins_pct=wins_pct(num_nodes) if num_nodes in fit else None,
        tokens_per_s=run.micro_batch * run.seq_len / step_s[run.copies],
        published_tokens_per_s=run.tokens_per_s,
    )


def _between_nodes(profile: Profile, gigabit_per_s: float | None) -> Profile:
    """Return the profile with so fast a link of each device between nodes."""
    if gigabit_per_s is None:
        return profile
    cluster = profile.file.cluster
    link = cluster.inter_node
    rate = link.beta_s_per_byte.model_copy(update={"value": 1 / (gigabit_per_s * GIGABIT)})
    link = link.model_copy(update={"beta_s_per_byte": rate})
    cluster = cluster.model_copy(update={"inter_node": link})
    return Profile(profile.file.model_copy(update={"cluster": cluster}))


@benchmark("copies_of_shards", quick={"count": 1})
def copies_of_shards(*, count: Annotated[int, "of the runs, the first"] = len(RUNS)) -> Result:
    return Result([priced(run, rate) for run in RUNS[:count] for rate in (None, 100.0, 50.0)])
