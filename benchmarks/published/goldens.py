"""Megatron-LM's regression runs: lines of flags, with the time of a step and what is allocated.

NVIDIA/Megatron-LM at d98e8a64ddf3, tests/functional_tests/test_cases/*/*/golden_values_*.json, on 8
devices each. Nearly all are so small that the host sets their steps, so they tell what issuing ops
takes on each device's host: half of the cases, by name, told `job_kernels`, `step_kernels` and
`ring_kernels` of megatron-core and the hosts' rates of A100, H100 and B200; the other half is kept
aside. This prints both.

Times hold for the software and the machine that a case was last recorded on, which the history of
its file tells and the table does not:

- Cases whose number of devices is unknown, and some by name (`OLDER`), were recorded in October
  2025 or before, on software whose steps took 1.1 to 1.3 times as long; of A100 all but
  `NEWER_A100` that are not of the long-term software. They are left out.
- Cases of H100 that were recorded on 7 May and 25 July 2026 (`SLOWER_HOST`) took `SLOWER_TIMES` as
  long as weeks before and after on the same software: a machine with a slower host. They are priced
  with that host, and nothing is fitted to them.
- On one node of GB200 (``_1node``) the same flags take 10 to 17 times as long as on two: faulty,
  left out.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED, records_of
from benchmarks.published.fit_rates import MeasuredRun
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import run_of
from costmodel.table.rows.run_row import RunRow
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_refusals import refusals
from planner.emit.megatron_row import row_of
from planner.emit.megatron_rules import Run, broken_rules
from planner.errors import PlannerError

GOLDENS = "megatron_goldens"
"""The table, and what its runs are called as a source."""

DEVICES = {"a100": "A100", "h100": "H100", "gb200": "GB200"}
"""Devices of these, by words of their platform."""

USUAL_DEVICE = "A100"
"""Of those whose platform the table leaves out: 89 of 94 are of files named ``..dgxa100_dracooci``
or ``lts.json``, which A100 ran."""

NEWER_H100 = frozenset(
    {
        "gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed",
        "gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
        "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
    }
)
"""Cases whose first line without a platform is of a file ``dev_dgxh100_dgxc``, which H100 ran."""

LONG_TERM_THEN = "megatron-core-te1"
"""What ran the files ``lts_dgxa100_dracooci`` and ``-ord``, and those of the long-term software not
recorded since: its container until November 2025 (NGC 24.01; docker/.ngc_version.lts)."""

SCRIPTS = {
    "bert": "pretrain_bert.py",
    "hybrid": "pretrain_hybrid.py",
    "mimo": "pretrain_vlm.py",
    "multimodal-llava": "pretrain_vlm.py",
    "t5": "pretrain_t5.py",
}
"""Scripts of these whose flags do not tell what model they train; pretrain_gpt.py else."""

SLOWER_TIMES = 1.45
"""How much longer the host of `SLOWER_HOST` takes: the median over 12 cases of steps on 7 May 2026
over those of 14 April and 29 May."""

SLOWER_HOST = frozenset(
    {
        "gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
        "gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
        "gpt3_mcore_te_tp1_pp4_resume_torch_dist_disable_bias_linear",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_calculate_per_token_loss",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce",
        "gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline",
        "gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split",
        "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective",
        "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM",
        "gpt3_mcore_te_tp2_pp2_resume_torch_dist",
        "gpt3_mcore_te_tp2_pp2_resume_torch_dist_ddp_average_in_collective",
        "gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
        "gpt3_mcore_te_tp4_pp1_resume_torch_dist_qk_layernorm_test_mode",
        "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
    }
)
"""Cases of H100 recorded there (their second halves, ``_2nd``, were not)."""

OLDER: Mapping[str, frozenset[str]] = {
    "dgx_h100": frozenset(
        {
            "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
            "gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
        }
    ),
    "dgx_a100": frozenset(
        {
            "bert_mcore_tp1_pp4_vp2",
            "bert_mcore_tp2_pp2",
            "gpt3_mcore_te_tp1_pp4_resume_torch_dist_disable_bias_linear",
            "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM",
            "gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router",
            "gpt3_mcore_tp2_pp2_uninstall_te",
            "t5_mcore_te_tp4_pp1",
            "t5_mcore_te_tp4_pp1_resume_torch_dist",
            "t5_mcore_tp1_pp1_vp1",
            "t5_mcore_tp1_pp1_vp1_resume_torch",
            "t5_mcore_tp2_pp1_vp1",
        }
    ),
}
"""Cases last recorded on software of October 2025, by platform; of A100 on the long-term one."""

NEWER_A100 = frozenset(
    {
        "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic",
        "gpt3_mcore_tp1_pp2_resume_torch_dist",
        "gpt3_mcore_tp1_pp4_resume_torch_dist",
        "gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel",
        "gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel_dp_last",
        "t5_mcore_tp1_pp1_vp1",
        "t5_mcore_tp1_pp1_vp1_resume_torch",
        "t5_mcore_tp2_pp1_vp1",
    }
)
"""Cases of A100 on current software that were recorded since."""


@dataclass(frozen=True, kw_only=True)
class Golden(MeasuredRun):
    """A case whose flags are priced, and its measured step."""

    case: str
    """Its name."""
    gpu: str
    """The device, as rows name it."""
    kind: str
    """dense, cp, experts, fp8, fsdp (Megatron-FSDP, whose hooks are not priced) or other (BERT,
    T5)."""
    is_slower_host: bool
    """Recorded on the machine with the slower host."""

    @property
    def is_aside(self) -> bool:
        """Whether nothing was fitted to it: by the sum of its name's letters."""
        return self.is_slower_host or zlib.crc32(self.case.encode()) % 2 == 0


def golden_rows(path: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Yield each line of the table whose flags are priced and whose number of devices is known,
    and the row that its flags make.
    """
    before: list[dict[str, str]] = []
    for line in records_of(path):
        before = [*(before if before and before[0]["case"] == line["case"] else ()), line]
        if not line["nodes"]:
            continue
        gpus = int(float(line["nodes"])) * int(float(line["gpus_per_node"]))
        script = SCRIPTS.get(line["model"], "pretrain_gpt.py")
        flags = parse_flags(f"{script} {line['flags']}")
        run = Run(flags=flags, num_devices=gpus, model={})
        try:
            if broken_rules(run) or refusals(run):
                continue
            row = {name: str(value) for name, value in row_of(run, {}, "", _gpu(before)).items()}
        except PlannerError:
            continue
        if row["stack"] == "megatron-core" and _is_long_term_then(before):
            row["stack"] = LONG_TERM_THEN
        yield line, row


def _gpu(before: Sequence[Mapping[str, str]]) -> str:
    """Return the device that ran the last of a case's lines so far."""
    platform = before[-1]["platform"]
    if named := next((name for word, name in DEVICES.items() if word in platform), ""):
        return named
    is_first = sum(not line["platform"] for line in before) == 1
    return "H100" if is_first and before[-1]["case"] in NEWER_H100 else USUAL_DEVICE


def _is_long_term_then(before: Sequence[Mapping[str, str]]) -> bool:
    """Whether the last of a case's lines so far is of the long-term software before November 2025.

    Lines of a case are in the order of its files' names, so that those without a platform behind
    ``lts_dgx_a100`` are of ``lts_dgxa100_*``.
    """
    line = before[-1]
    if line["env"] == "lts":
        return line["case"] in OLDER["dgx_a100"] and line["platform"] == "dgx_a100"
    return not line["platform"] and any(other["env"] == "lts" for other in before)


def golden_steps(path: Path) -> list[Golden]:
    """Return the cases whose step time holds for known software and a known machine."""
    found = []
    for line, row in golden_rows(path):
        if not line["step_s"] or not _is_current(line):
            continue
        try:
            run, profile, rates = run_of(row)
        except PlannerError:
            continue
        slower = line["platform"] == "dgx_h100" and line["case"] in SLOWER_HOST
        found.append(
            Golden(
                run=run,
                profile=profile,
                rates=replace(rates, host_scale=SLOWER_TIMES) if slower else rates,
                step_s=float(line["step_s"]),
                case=line["case"],
                gpu=row["gpu"],
                kind=_kind(line, run),
                is_slower_host=slower,
            )
        )
    return found


def goldens_fitted(path: Path) -> list[Golden]:
    """Return the cases that hosts' rates are fitted to: of kinds that are priced whole."""
    kinds = ("dense", "cp", "experts")
    return [golden for golden in golden_steps(path) if not golden.is_aside and golden.kind in kinds]


def _is_current(line: Mapping[str, str]) -> bool:
    platform, case = line["platform"], line["case"]
    if platform.startswith("dgx_a100") and line["env"] == "dev":
        return case in NEWER_A100
    is_known = platform.startswith("dgx_") and not case.endswith("_1node")
    return is_known and case not in OLDER.get(platform, ())


def _kind(line: Mapping[str, str], run: RunRow) -> str:
    if line["model"] not in ("gpt", "moe"):
        return "other"
    if run.zero_stage == 3:
        return "fsdp"
    if run.dtype.startswith("float8"):
        return "fp8"
    if run.sizes.experts is not None:
        return "experts"
    return "cp" if run.cp > 1 else "dense"


@benchmark("goldens", quick={"every": 8})
def goldens(
    *,
    rows: Path = PUBLISHED / f"{GOLDENS}.csv",
    every: Annotated[int, "price one case of so many"] = 1,
    cases: Annotated[bool, "a line for each case"] = False,
) -> Result:
    prices, found = RowPrices(), golden_steps(rows)[::every]
    errors = []
    for golden in found:
        step_s = prices.step_seconds(golden.run, golden.profile, golden.rates, room_bytes=np.inf)
        errors.append(step_s / golden.step_s - 1)
    if cases:
        lines = [
            {"case": g.case, "gpu": g.gpu, "kind": g.kind, "aside": g.is_aside,
             "step_ms": 1e3 * g.step_s, "error_pct": 100 * error}
            for g, error in zip(found, errors, strict=True)
        ]  # fmt: skip
        return Result(lines)
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for golden, error in zip(found, errors, strict=True):
        host = ", slower host" if golden.is_slower_host else ""
        part = "aside" if golden.is_aside else "fitted"
        groups[golden.gpu + host, golden.kind, part].append(error)
    return Result(
        [
            {"gpu": gpu, "kind": kind, "half": half, "cases": len(of_group),
             "mape_pct": 100 * float(np.abs(of_group).mean()),
             "bias_pct": 100 * float(np.mean(of_group))}
            for (gpu, kind, half), of_group in sorted(groups.items())
        ]
    )  # fmt: skip
