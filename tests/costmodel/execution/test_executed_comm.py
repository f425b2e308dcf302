"""Collectives of blocks with experts, by hand: what is sent, how fast, and what compute hides."""

from dataclasses import replace

import pytest

from costmodel.execution.executed_comm import sent_part
from costmodel.execution.execution import Execution
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import run_of
from profiles import Group

QWEN = {
    "stack": "megatron-core", "gpu": "GB200", "gpus": "32", "model": "Qwen3-30B-A3B",
    "seq_len": "4096", "global_batch": "64", "micro_batch": "2", "tp": "1", "pp": "1", "dp": "32",
    "ep": "8", "dtype": "bf16", "notes": "MoE force-balanced",
}  # fmt: skip


@pytest.mark.parametrize(
    ("per_token", "group", "part"),
    [
        (1, Group(ranks_per_node=8, num_nodes=1), 1.0),
        # Of 2 ranks each is missed by both experts of a token once in four.
        (2, Group(ranks_per_node=2, num_nodes=1), 2 * 0.75 / 2),
        (8, Group(ranks_per_node=8, num_nodes=1), 1 - (7 / 8) ** 8),
        # Between nodes a token goes to a node once, however many ranks there have its experts.
        (8, Group(ranks_per_node=8, num_nodes=2), 2 * (1 - 0.5**8) / 8),
    ],
)
def test_a_token_goes_once_to_each_place(per_token: int, group: Group, part: float) -> None:
    assert sent_part(per_token, group) == pytest.approx(part)


def exchange_s(row: dict[str, str], **changes: object) -> float:
    """Seconds of a step's collectives but those of replicas, of a row's stack with changes."""
    run, profile, rates = run_of(row)
    stack: Execution = replace(run.stack, **changes)
    found = RowPrices().estimate(replace(run, stack=stack), profile, rates)
    return found.path.parts["tp_comm_s"]


def test_dispatchers_that_send_tokens_send_less() -> None:
    rows, tokens = (exchange_s(QWEN, sends_tokens=sends) for sends in (False, True))
    # A large message takes as long as it has bytes.
    assert tokens / rows == pytest.approx(1 - (7 / 8) ** 8, rel=0.1)


def test_exchanges_of_more_than_eight_ranks_of_a_domain_are_slow() -> None:
    narrow, wide = QWEN, {**QWEN, "ep": "32"}
    assert exchange_s(narrow, wide_exchange_part=0.5) == exchange_s(narrow, wide_exchange_part=1.0)
    assert exchange_s(wide, wide_exchange_part=0.5) == pytest.approx(
        2 * exchange_s(wide, wide_exchange_part=1.0)
    )


def test_rows_beside_another_microbatch_show_in_part() -> None:
    _, _, rates = run_of(QWEN)
    bare, beside = (exchange_s(QWEN, overlaps=overlaps) for overlaps in ((), ("rows",)))
    assert beside == pytest.approx(rates.exposed_part * bare)


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


def test_the_dispatcher_that_gathers_gives_each_rank_all_tokens() -> None:
    """8 ranks' tokens once, where 8 rows of each token went to their experts."""
    rows = exchange_s(QWEN)
    gathered = exchange_s(QWEN, sends_tokens=True, gathers_tokens=True)
    assert gathered == pytest.approx(rows, rel=0.1)
    # Of 2 rows a quarter goes, and an exchange's latency is the same.
    few = {**QWEN, "experts_per_token": "2"}
    assert 3 < exchange_s(few, sends_tokens=True, gathers_tokens=True) / exchange_s(few) < 4
