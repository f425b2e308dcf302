"""B11: Records of dispatchers: complete, with sources; what an exchange takes on each, by hand."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from costmodel.execution import execution_names, find_execution
from costmodel.execution.dispatch import dispatcher as records
from costmodel.execution.dispatch.dispatcher import (
    Dispatcher,
    dispatcher_entries,
    dispatcher_names,
    find_dispatcher,
)
from costmodel.execution.dispatch.exchange import sent_part
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import run_of
from planner.errors import PlannerError
from profiles import Group

NODE = Group(ranks_per_node=8, num_nodes=1)
TWO_NODES = Group(ranks_per_node=8, num_nodes=2)

QWEN = {
    "stack": "megatron-core", "gpu": "GB200", "gpus": "32", "model": "Qwen3-30B-A3B",
    "seq_len": "4096", "global_batch": "64", "micro_batch": "2", "tp": "1", "pp": "1", "dp": "32",
    "ep": "8", "dtype": "bf16", "notes": "MoE force-balanced",
}  # fmt: skip


@pytest.mark.parametrize("name", dispatcher_names())
def test_every_constant_has_a_source(name: str) -> None:
    entries = dispatcher_entries(name)
    assert set(entries) == {field.name for field in fields(Dispatcher)} - {"name"}
    assert all(len(entry["source"]) > 10 for entry in entries.values())
    assert find_dispatcher(name).name == name


def test_runtimes_have_dispatchers_that_are_there() -> None:
    for name in execution_names():
        assert all(map(find_dispatcher, find_execution(name).dispatchers))
    with pytest.raises(PlannerError, match="dispatcher 'pigeon' is unknown; valid names: allg"):
        find_dispatcher("pigeon")


def test_a_record_that_lacks_a_constant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"values": {"call_s": {"value": 0.0, "source": "none"}}})
    (tmp_path / "toy.json").write_text(text)
    monkeypatch.setattr(records, "DATA", tmp_path)
    with pytest.raises(PlannerError, match=r"dispatcher record toy\.json lacks sends"):
        find_dispatcher("toy")


@pytest.mark.parametrize(
    ("sends", "per_token", "group", "part"),
    [
        ("expert", 8, NODE, 1.0),
        ("node", 1, NODE, 1.0),
        # Of 2 ranks each is missed by both experts of a token once in four.
        ("rank", 2, Group(ranks_per_node=2, num_nodes=1), 2 * 0.75 / 2),
        ("node", 8, NODE, 1 - (7 / 8) ** 8),
        # Between nodes a token goes to a node once, however many ranks there have its experts.
        ("node", 8, TWO_NODES, 2 * (1 - 0.5**8) / 8),
        ("rank", 8, TWO_NODES, 16 * (1 - (15 / 16) ** 8) / 8),
        ("all", 8, TWO_NODES, 2.0),
    ],
)
def test_a_token_goes_once_to_each_place(
    sends: str, per_token: int, group: Group, part: float
) -> None:
    dispatcher = replace(find_dispatcher("alltoall"), sends=sends)
    assert sent_part(dispatcher, per_token, group) == pytest.approx(part)


def exchange_s(row: dict[str, str], dispatcher: str) -> float:
    """Seconds of a step's collectives but those of replicas, of a row on a dispatcher."""
    run, profile, rates = run_of({**row, "dispatcher": dispatcher})
    return RowPrices().estimate(run, profile, rates).path.parts["tp_comm_s"]


def test_dispatchers_that_send_tokens_send_less() -> None:
    # A large message takes as long as it has bytes.
    part = exchange_s(QWEN, "HybridEP") / exchange_s(QWEN, "alltoall")
    assert part == pytest.approx(1 - (7 / 8) ** 8, rel=0.1)


def test_exchanges_of_more_than_eight_ranks_of_a_domain_are_slow_but_on_hybridep() -> None:
    assert exchange_s({**QWEN, "ep": "32"}, "HybridEP") < 0.6 * exchange_s(
        {**QWEN, "ep": "32"}, "DeepEP"
    )


def test_the_dispatcher_that_gathers_gives_each_rank_all_tokens() -> None:
    """8 ranks' tokens once, where 8 rows of each token went to their experts."""
    rows = exchange_s(QWEN, "alltoall")
    assert exchange_s(QWEN, "allgather") == pytest.approx(rows, rel=0.1)
    # Of 2 rows a quarter goes, and an exchange's latency is the same.
    few = {**QWEN, "experts_per_token": "2"}
    assert 3 < exchange_s(few, "allgather") / exchange_s(few, "alltoall") < 4


def test_a_call_is_paid_by_each_exchange_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a forward and two in a backward: 4 ms a layer and microbatch of 1 ms a call."""
    run, profile, rates = run_of({**QWEN, "dispatcher": "DeepEP"})
    prompt = RowPrices().estimate(run, profile, rates).path.parts["tp_comm_s"]
    slow = replace(find_dispatcher("deepep"), call_s=find_dispatcher("deepep").call_s + 1e-3)
    monkeypatch.setattr("costmodel.execution.dispatch.choice.find_dispatcher", lambda name: slow)
    late = RowPrices().estimate(run, profile, rates).path.parts["tp_comm_s"]
    assert late - prompt == pytest.approx(4e-3 * 48 * run.num_microbatches, rel=0.01)


def test_fewer_bytes_go_there_in_eight_bits_and_the_fullest_rank_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_(**changes: object) -> float:
        changed = replace(find_dispatcher("alltoall"), **changes)
        monkeypatch.setattr(
            "costmodel.execution.dispatch.choice.find_dispatcher", lambda name: changed
        )
        uneven = {**QWEN, "micro_batch": "2", "notes": "natural routing"}
        run, profile, rates = run_of(uneven)
        return RowPrices().estimate(run, profile, rates).path.parts["tp_comm_s"]

    whole = with_()
    # Of the two exchanges of a forward and the two of a backward the first alone is narrow.
    assert with_(narrow_bytes=1.0) / whole == pytest.approx(3.5 / 4, rel=0.03)
    # The fullest of 8 ranks has 2.24 times the mean at an imbalance of 0.66.
    assert whole / with_(waits_for_fullest=False) == pytest.approx(2.24, rel=0.1)


def test_the_cheapest_dispatcher_of_a_runtime_is_taken_for_each_case() -> None:
    run, profile, rates = run_of({**QWEN, "ep": "32", "gpu": "H100-SXM"})
    core = find_execution("megatron-core")
    seconds = {}
    for names in (core.dispatchers, *((name,) for name in core.dispatchers)):
        changed = replace(run, stack=replace(run.stack, dispatchers=names))
        plan, costs = RowPrices().plan(changed, profile, rates)
        layouts = tuple(layout for layout in plan.layouts if layout.class_index == 1)
        priced = costs.block(1, plan.microbatch_size, plan.degrees, layouts)
        seconds[names] = priced.times.whole_forward_s + priced.times.whole_backward_s
        if len(names) > 1:
            chosen = priced.dispatcher
        else:
            assert priced.dispatcher == names[0]
    assert seconds[core.dispatchers] == seconds[(chosen,)] == min(seconds.values())
    assert chosen != "alltoall"


def test_buffers_of_a_dispatcher_lie_beside_the_context() -> None:
    """DeepEP's: 2,880 rows of 2,048 in bf16 for each of 8 ranks of the node and each of 4 nodes."""
    row = {**QWEN, "ep": "32", "gpu": "H100-SXM"}
    held = {
        name: RowPrices().estimate(*run_of({**row, "dispatcher": name})).memory[0].context_bytes
        for name in ("alltoall", "deepep")
    }
    assert held["deepep"] - held["alltoall"] == 2880 * (8 + 4) * 2048 * 2


def test_a_dispatcher_runs_where_its_record_says() -> None:
    deep = find_dispatcher("deepep")
    assert deep.runs("NVIDIA H100 80GB HBM3", 64)
    assert not deep.runs("NVIDIA H100 80GB HBM3", 256)
    assert not deep.runs("NVIDIA A100-SXM4-80GB", 8)
    assert find_dispatcher("alltoall").runs("cpu", 2048)


def test_shared_experts_hide_no_more_than_they_take() -> None:
    """DeepSeek-V3's shared expert beside its all-to-alls: half of what it hides shows still."""
    row = {
        **QWEN, "model": "DeepSeek-V3", "gpus": "64", "dp": "64", "gpu": "H100-SXM", "layers": "8",
        "recompute": "none", "dispatcher": "alltoall",
    }  # fmt: skip

    def comm_s(notes: str, **changes: str) -> float:
        run, profile, rates = run_of({**row, **changes, "notes": f"MoE force-balanced; {notes}"})
        return RowPrices().estimate(run, profile, rates).path.parts["tp_comm_s"]

    bare, beside = comm_s(""), comm_s("shared expert overlap")
    assert beside < bare
    # Wider shared experts hide more, up to all exchanges; of these `exposed_part` shows.
    wider = comm_s("shared expert overlap", shared_width="16384")
    assert 0.5 * bare < wider < beside
    # DeepEP's exchanges have no part in it.
    apart = {"dispatcher": "DeepEP"}
    assert comm_s("shared expert overlap", **apart) == comm_s("", **apart)
