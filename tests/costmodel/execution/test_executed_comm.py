"""Collectives of blocks with experts, by hand: what is sent, how fast, and what compute hides."""

from dataclasses import replace

import pytest

from costmodel.execution.dispatch.dispatcher import find_dispatcher
from costmodel.execution.execution import Execution
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import run_of

QWEN = {
    "stack": "megatron-core", "gpu": "GB200", "gpus": "32", "model": "Qwen3-30B-A3B",
    "seq_len": "4096", "global_batch": "64", "micro_batch": "2", "tp": "1", "pp": "1", "dp": "32",
    "ep": "8", "dtype": "bf16", "notes": "MoE force-balanced",
}  # fmt: skip


def exchange_s(row: dict[str, str], **changes: object) -> float:
    """Seconds of a step's collectives but those of replicas, of a row's stack with changes."""
    run, profile, rates = run_of(row)
    stack: Execution = replace(run.stack, **changes)
    found = RowPrices().estimate(replace(run, stack=stack), profile, rates)
    return found.path.parts["tp_comm_s"]


def test_rows_beside_another_microbatch_show_in_part() -> None:
    _, _, rates = run_of(QWEN)
    bare, beside = (exchange_s(QWEN, overlaps=overlaps) for overlaps in ((), ("rows",)))
    taken = find_dispatcher("alltoall").sms_part
    assert beside == pytest.approx((rates.exposed_part + taken) * bare)


def test_collectives_that_cross_nodes_start_late() -> None:
    """Four forward and four backward of each layer, on two nodes; one of the embedding's rows."""
    row = {
        **QWEN, "gpu": "H100-SXM", "model": "Llama2-7B", "stack": "nanotron", "tp": "16",
        "dp": "2", "ep": "1", "zero_stage": "1", "notes": "",
    }  # fmt: skip
    late, prompt = (exchange_s(row, crossing_late_s=late_s) for late_s in (1e-3, 0.0))
    layers, microbatches = 32, 16
    assert late - prompt == pytest.approx(8e-3 * layers * microbatches, rel=0.05)
    inside = {**row, "tp": "8", "dp": "4"}
    assert exchange_s(inside, crossing_late_s=1e-3) == exchange_s(inside, crossing_late_s=0.0)
