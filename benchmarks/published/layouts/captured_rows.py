"""Captured models under published layouts: their price beside that of the row, and the measurement.

A row is priced as the trainers of large models write it (`costmodel.table.rows.row_plan`). Here the
same model is as a user's library writes it: the template of Hugging Face's code, which is op for op
the capture (`tests/templates/test_published_layouts.py` captures each at the published width). Its
blocks lie on the row's stages, with the placements that a search finds for the row's degrees
(`find_plan`), or with the usual ones where ranks split positions or experts, and run as the row's
runtime runs them. Both prices are of one `estimate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED
from benchmarks.published.accuracy import measured_seconds
from costmodel.cache import CostCache
from costmodel.estimate import Estimate, estimate
from costmodel.table.kernels import DeviceRates
from costmodel.table.rows.row_files import read_rows
from costmodel.table.rows.row_plan import RowPrices, recomputed_ops, transformer_of
from costmodel.table.rows.rows import run_of
from costmodel.table.rows.run_row import RunRow
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.templates import Transformer, build_transformer
from profiles import Profile
from search import SearchRequest, find_plan

NO_LIMIT = 10**15
"""Bytes of memory with which no placement is refused: the row says what fits."""

# fmt: off
ROWS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("measured.csv", "torchtitan_perf_2024", {"model": "Llama3-8B", "gpu": "A100-SXM"}),
    ("measured.csv", "dgxc_2411", {"model": "Llama3.1-8B", "gpus": "8", "dtype": "bf16"}),
    ("measured.csv", "torchtitan_perf_2024", {"model": "Llama3-70B", "gpu": "A100-SXM"}),
    ("measured.csv", "mlm_llama_readme", {"model": "LLAMA3-70B"}),
    ("measured.csv", "dgxc_2411", {"model": "GPT3-175B", "gpus": "128", "dtype": "bf16"}),
    ("measured.csv", "dgxc_2411", {"model": "GPT3-175B", "gpus": "128", "dtype": "fp8"}),
    ("moe_cp.csv", "moecp_Megatron-MoE-ModelZoo", {"model": "Mixtral-8x22B", "dtype": "bf16"}),
)
"""The first row of a source with such cells: dense and mixed, on one to 128 devices."""
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A row's price, and that of the captured model under its layout."""

    run: RunRow
    row: Estimate
    captured: Estimate

    @property
    def difference(self) -> float:
        """Relative difference of the captured model's step."""
        return self.captured.step_s / self.row.step_s - 1


def captured_model(run: RunRow) -> Transformer:
    """Return a row's model as Hugging Face's library writes it."""
    model = replace(transformer_of(run), code="huggingface")
    return model if run.sizes.gated else replace(model, max_positions=run.sizes.seq_len)


def _placed(run: RunRow, model: Transformer, plan: Plan, profile: Profile) -> Plan:
    """Return a row's plan with placements of another code's ops."""
    graph = build_transformer(model)
    if run.tp > 1 and run.cp == run.ep == 1:
        request = SearchRequest(
            num_devices=run.gpus,
            global_batch=run.global_batch,
            dp=run.dp,
            tp=run.tp,
            pp=run.pp,
            vpp=plan.vpp,
            microbatch_size=run.micro_batch,
            schedule=plan.schedule if run.pp > 1 else None,
            zero=run.zero_stage,
            recompute="none",
            precision=plan.precision,
            execution=run.stack.name,
            offload="none",
            balance=tuple(len(stage.blocks) for stage in plan.stages),
            memory_limit_bytes=NO_LIMIT,
        )
        found = find_plan(graph, profile, request).plan
        assert found is not None, "nothing is refused"
    else:
        sizes = {"dp": run.dp, "tp": run.tp, "cp": run.cp, "ep": run.ep}
        found = default_plan(graph, **{axis: size for axis, size in sizes.items() if size > 1})
    again = recomputed_ops(model, run.recompute, run.stack.selective_by_op)
    return plan.model_copy(update={"layouts": found.layouts, "recomputed": again})


def price_both(run: RunRow, profile: Profile, rates: DeviceRates) -> Priced:
    """Price a row, and the captured model under its layout."""
    prices = RowPrices()
    plan, costs = prices.plan(run, profile, rates)
    model = captured_model(run)
    graph, placed = build_transformer(model), _placed(run, model, plan, profile)
    own = CostCache(graph, costs.profile, execution=run.stack)
    return Priced(
        run=run,
        row=prices.estimate(run, profile, rates),
        captured=estimate(graph, costs.profile, placed, costs=own),
    )


def published(file: str, source: str, cells: Mapping[str, str]) -> dict[str, str]:
    """Return the first row of a source with such cells."""
    return next(
        row
        for row in read_rows(PUBLISHED / file)
        if row["source_id"] == source and all(row[name] == cells[name] for name in cells)
    )


@benchmark("captured_rows", quick={"count": 2})
def captured_rows(*, count: Annotated[int, "of these rows, the first"] = len(ROWS)) -> Result:
    lines = []
    for file, source, cells in ROWS[:count]:
        row = published(file, source, cells)
        run, profile, rates = run_of(row)
        found = price_both(run, profile, rates)
        step_s = measured_seconds(row, run) or float("nan")
        lines.append(
            {
                "model": f"{row['model']} {row['dtype']}",
                "source": source,
                **{axis: getattr(run, axis) for axis in ("dp", "cp", "tp", "pp", "vpp", "ep")},
                "measured_s": step_s,
                "row_s": found.row.step_s,
                "row_error_pct": 100 * (found.row.step_s / step_s - 1),
                "captured_s": found.captured.step_s,
                "captured_error_pct": 100 * (found.captured.step_s / step_s - 1),
                "difference_pct": 100 * found.difference,
            }
        )
    return Result(lines)
