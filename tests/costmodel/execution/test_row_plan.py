"""Rows as plans: a plan has what its row says, and its step has the time that it should."""

from dataclasses import replace

import pytest

from costmodel.execution.dispatch.imbalance import expected_fullest
from costmodel.table.rows.row_plan import (
    RowPrices,
    is_nearly_full,
    plan_of,
    retry_seconds,
    transformer_of,
)
from costmodel.table.rows.rows import predict_row, price_row, run_of
from planner.errors import PlannerError
from planner.language.ops.record import family_of
from planner.language.templates import build_transformer

GPT = {
    "stack": "megatron-classic", "gpu": "A100-SXM", "gpus": "8", "layers": "24", "hidden": "2048",
    "heads": "16", "ffn_hidden": "8192", "gated_ffn": "0", "vocab": "50257", "seq_len": "1024",
    "global_batch": "32", "micro_batch": "2", "tp": "2", "pp": "2", "dp": "2",
    "schedule": "1f1b", "recompute": "full", "dtype": "fp16",
}  # fmt: skip
LLAMA = {
    "stack": "NeMo", "gpu": "H100-SXM", "gpus": "64", "model": "Llama3-70B", "seq_len": "8192",
    "global_batch": "64", "micro_batch": "1", "tp": "4", "cp": "2", "pp": "4", "vpp": "5",
    "dp": "2", "dtype": "bf16",
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model": "Mixtral-8x7B", "seq_len": "4096", "tp": "1", "cp": "1", "pp": "4",
    "dp": "16", "vpp": "1", "ep": "8",
}  # fmt: skip
ROWS = {
    "gpt": GPT,
    "gpt, many microbatches": {**GPT, "tp": "1", "dp": "4", "recompute": "none"},
    "llama": LLAMA,
    "llama in fp8": {**LLAMA, "dtype": "fp8"},
    "fsdp": {**LLAMA, "stack": "fsdp-flash", "model": "Llama3-8B", "tp": "1", "cp": "1",
             "pp": "1", "vpp": "1", "dp": "64"},
    "nanotron": {**LLAMA, "stack": "nanotron", "model": "Llama3-8B", "cp": "1", "pp": "1",
                 "vpp": "1", "dp": "16", "zero_stage": "1"},
    "mixtral": MIXTRAL,
}  # fmt: skip


CLOSED_FORMS_S = {
    "gpt": 0.51, "gpt, many microbatches": 0.32, "llama": 7.55, "llama in fp8": 5.32, "fsdp": 1.12,
    "nanotron": 1.36, "mixtral": 1.19,
}  # fmt: skip
"""Seconds of a step by a second cost model, of closed forms of a transformer's layer, that there
was until decision 23: an independent count of the same kernels and messages."""


@pytest.mark.parametrize("name", CLOSED_FORMS_S)
def test_a_row_takes_about_what_closed_forms_say(name: str) -> None:
    run, profile, rates = run_of(ROWS[name])
    assert RowPrices().estimate(run, profile, rates).step_s == pytest.approx(
        CLOSED_FORMS_S[name], rel=0.1
    )


def test_a_plan_has_what_the_row_says() -> None:
    run, _, _ = run_of(LLAMA)
    model = transformer_of(run)
    plan = plan_of(run, model, devices_per_node=8)
    assert dict(plan.degrees) == {"rp": 1, "dp": 2, "cp": 2, "hp": 1, "tp": 4}
    assert (plan.pp, plan.vpp, plan.schedule) == (4, 5, "interleaved_1f1b")
    assert (plan.global_batch, plan.num_microbatches) == (64, 32)
    blocks = [len(stage.blocks) for stage in plan.stages]
    # Four layers a stage; the embedding and the head come on top.
    assert blocks == [5, *[4] * 18, 5]
    assert model.kv_heads == 8
    assert model.positions == "rotary"


def test_each_rank_has_a_head_of_keys_where_there_are_fewer_than_ranks() -> None:
    """As published runs of Qwen3-235B-A22B have it, with 4 heads of keys on tp 8."""
    row = {**MIXTRAL, "model": "Qwen3-235B-A22B", "tp": "8", "dp": "2"}
    run, profile, rates = run_of(row)
    assert transformer_of(run).kv_heads == 8
    assert RowPrices().estimate(run, profile, rates).step_s > 0


def test_layers_that_do_not_divide_leave_the_ends_fewer() -> None:
    run, _, _ = run_of({**GPT, "layers": "46", "pp": "8", "gpus": "32"})
    plan = plan_of(run, transformer_of(run), devices_per_node=8)
    assert [len(stage.blocks) for stage in plan.stages] == [6, *[6] * 6, 6]


def test_nanotron_gives_the_stage_with_the_head_fewer_layers() -> None:
    run, _, _ = run_of({**ROWS["nanotron"], "tp": "1", "pp": "4", "dp": "16", "vocab": "131072"})
    plan = plan_of(run, transformer_of(run), devices_per_node=8)
    layers = [len(stage.blocks) for stage in plan.stages]
    assert sum(layers) == 34
    assert layers[-1] < layers[1]


def test_few_microbatches_go_forward_first() -> None:
    run, profile, rates = run_of({**GPT, "pp": "4", "tp": "1", "dp": "2", "global_batch": "8"})
    plan = plan_of(run, transformer_of(run), devices_per_node=8)
    assert plan.table[0] == "0F0 0F1 0B0 0B1"
    assert RowPrices().estimate(run, profile, rates).path.fill_drain_s > 0


def test_memory_is_the_exact_walk() -> None:
    run, profile, rates = run_of(GPT)
    found = RowPrices().estimate(run, profile, rates)
    assert len(found.memory) == 2
    # Weights and sums of gradients, masters and moments in 2 + 4 + 12 bytes of half the model each.
    params = 24 * 12 * 2048**2 / 4 + 50304 * 2048 / 2
    # Beside weights, a workspace of products for each of two threads.
    weights = found.memory[0].parameter_bytes - 2 * (8 * 2**20 + 2**17)
    assert weights == pytest.approx(2 * params, rel=0.02)
    assert found.memory[0].optimizer_bytes == pytest.approx(12 * params, rel=0.02)


def test_a_rank_holds_and_steps_on_its_part_of_the_experts() -> None:
    """32 layers of 8 experts with 3 matrices of 4096 x 14336: of 4 pp ranks each has 8 layers."""
    memory = {}
    for ep in (1, 2, 8):
        run, profile, rates = run_of({**MIXTRAL, "ep": str(ep)})
        memory[ep] = RowPrices().estimate(run, profile, rates).memory[1]
    experts = 8 * 8 * 3 * 4096 * 14336
    saved = memory[1].gradient_bytes - memory[8].gradient_bytes
    # Sums of gradients in four bytes, whatever a walk counts beside them.
    assert saved == pytest.approx(4 * experts * (1 - 1 / 8), rel=0.02)
    # ZeRO shards all of them over the 16 ranks together, however they are dealt.
    assert memory[2].optimizer_bytes == pytest.approx(memory[8].optimizer_bytes, rel=1e-3)


@pytest.mark.parametrize(("ep", "mesh"), [("4", (4, 2)), ("16", (16, 1))])
def test_whole_experts_lie_on_tp_ranks_where_others_are_too_few(
    ep: str, mesh: tuple[int, int]
) -> None:
    model = {**MIXTRAL, "model": "Qwen3-30B-A3B", "tp": "2", "dp": "8", "ep": ep}
    run, profile, rates = run_of(model)
    plan = plan_of(run, transformer_of(run), devices_per_node=8)
    assert (plan.degrees["ep"], plan.degrees["etp"]) == mesh
    assert plan.degrees.num_ranks == 16
    assert plan.degrees.expert_replicas == 16 // (mesh[0] * mesh[1])
    assert RowPrices().estimate(run, profile, rates).step_s > 0


@pytest.mark.parametrize(
    ("said", "sigma", "is_dropless"),
    [
        ("", 0.12, True),
        ("MoE force-balanced", 0.0, True),
        ("token drop", 0.0, False),
        ("SFT, natural routing", 0.66, True),
    ],
)
def test_a_row_says_how_even_its_routing_is(said: str, sigma: float, is_dropless: bool) -> None:
    run, _, _ = run_of({**MIXTRAL, "notes": said})
    assert run.stack.expert_imbalance == sigma
    assert run.stack.dropless is is_dropless


LORA = {
    "stack": "NeMo", "gpu": "H100-SXM", "gpus": "8", "model": "Llama2-70B-LoRA-r16",
    "seq_len": "8192", "global_batch": "8", "micro_batch": "1", "tp": "4", "dp": "2",
    "dtype": "fp8",
}  # fmt: skip


def test_a_row_of_adapters_trains_them_alone() -> None:
    """MLPerf's: 3.67 to 4.17 s a step. Frozen weights have no state, no sums and no products for
    their gradients; adapters have all of these, in 16 bits."""
    prices = RowPrices()
    run, profile, rates = run_of(LORA)
    tuned = prices.estimate(run, profile, rates)
    trained = prices.estimate(*run_of({**LORA, "model": "Llama2-70B"}))
    assert 3.3 < tuned.step_s < 4.3
    # 0.69 of the flop, and passes over the adapters' inputs.
    assert tuned.flop / trained.flop == pytest.approx(0.69, abs=0.01)
    assert 0.7 < tuned.path.parts["compute_s"] / trained.path.parts["compute_s"] < 0.85
    # 44,564,480 parameters, of which tp divides the columns of A or its rows, and B's columns.
    assert tuned.memory[0].optimizer_bytes == pytest.approx(12 * 44_564_480 / 4 / 2, rel=0.02)
    # Of frozen ones, 68,976,648,192, ZeRO 1 divides nothing.
    assert tuned.memory[0].parameter_bytes == pytest.approx(2 * 68_976_648_192 / 4, rel=0.01)
    model = transformer_of(run)
    assert model.adapters is not None
    assert (model.adapters.rank, model.adapters.alpha, model.adapters.dropout) == (16, 32, 0.1)


def test_a_table_of_rows_prices_adapters_so_too() -> None:
    found = predict_row(LORA)
    assert 3.3 < found["predicted_step_time_s"] < 4.3
    assert 32 < found["predicted_peak_mem_gib"] < 75
    assert found["predicted_fits"] == "yes"


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        ({}, 16),
        ({"model": "Llama2-70B"}, 0),
        ({"model": "Llama2-70B LoRA rank 8"}, 8),
        ({"model": "Llama2-70B lora"}, 16),
        ({"model": "Llama2-70B", "lora_rank": "32"}, 32),
        ({"lora_rank": "0"}, 0),
    ],
    ids=str,
)
def test_a_row_says_the_rank_of_its_adapters(said: dict[str, str], rank: int) -> None:
    assert run_of({**LORA, **said})[0].lora_rank == rank


def test_a_row_says_that_layers_are_compiled() -> None:
    row = {**ROWS["fsdp"], "notes": "torch.compile+Float8"}
    assert run_of(row)[0].stack.name == "torchtitan-compiled"
    assert run_of({**row, "notes": "ZB without compile"})[0].stack.name == "fsdp-flash"
    assert run_of({**row, "stack": "nanotron"})[0].stack.name == "nanotron"


def test_layers_as_cuda_graphs_leave_the_host_little_to_do() -> None:
    row = {**LORA, "gpu": "GB200", "gpus": "72", "tp": "1", "cp": "8", "dp": "9"}
    eager, graphs = (
        RowPrices().estimate(*run_of({**row, "notes": notes})).path.parts
        for notes in ("", "CUDA graphs")
    )
    assert graphs["host_s"] < 0.1 * eager["host_s"]
    assert graphs["compute_s"] == pytest.approx(eager["compute_s"])


def test_parts_of_layers_as_cuda_graphs_leave_the_host_the_rest() -> None:
    row = {**MIXTRAL, "gpu": "GB200"}
    kernels = [
        (stack.forward_kernels, stack.router_kernels, stack.expert_kernels)
        for notes in ("", "CUDA graphs of router", "CUDA graphs of attention and router")
        for stack in (run_of({**row, "notes": notes})[0].stack,)
    ]
    whole, router, both = kernels
    assert whole[0] == router[0] > both[0] > 1
    assert whole[1] > router[1] == both[1] > 1
    assert whole[2] == router[2] == both[2]


def test_hosts_of_p5_nodes_are_late_between_stages_of_several_nodes() -> None:
    row = {**LORA, "gpu": "H100", "gpus": "32", "tp": "8", "pp": "4", "cp": "1", "dp": "1"}
    usual, late = (
        RowPrices().estimate(*run_of({**row, "notes": notes})).path.parts
        for notes in ("", "P5 nodes; 3200 Gb/s between nodes")
    )
    assert late["host_s"] > 1.5 * usual["host_s"]
    assert run_of({**row, "notes": "P5 nodes"})[0].stack.polled_late_s > 0
    assert run_of({**row, "notes": "H100"})[0].stack.polled_late_s == 0


@pytest.mark.parametrize(
    ("said", "dispatcher"),
    [("dispatcher alltoall", "alltoall"), ("dispatcher DeepEP", "deepep"),
     ("dispatcher HybridEP", "hybridep"), ("dispatcher deepep-uccl", "deepep-uccl")],
)  # fmt: skip
def test_a_row_names_its_dispatcher(said: str, dispatcher: str) -> None:
    for row in ({**MIXTRAL, "notes": said}, {**MIXTRAL, "dispatcher": said.split()[1]}):
        stack = run_of(row)[0].stack
        assert stack.dispatchers == (dispatcher,)
    assert "rows" in run_of({**MIXTRAL, "notes": "all-to-all overlap"})[0].stack.overlaps


def test_rows_in_eight_bits_are_padded_and_multiplied_one_by_one() -> None:
    """A layer's 65,536 rows of 4096, of 8 experts: one more pass each way, forward and backward."""
    times = {}
    for pads in (True, False):
        run, profile, rates = run_of({**MIXTRAL, "dtype": "fp8"})
        changed = replace(run, stack=replace(run.stack, pads_rows=pads))
        times[pads] = RowPrices().estimate(changed, profile, rates).path.parts["compute_s"]
    fullest = expected_fullest(run.stack.expert_imbalance, run.ep)
    rows = 2 * 4096 * run.micro_batch * fullest
    moved = 2 * 2 * 2 * (rows + 2 * 4096 * run.micro_batch) * 4096
    layers = 8 * run.num_microbatches
    assert times[True] - times[False] == pytest.approx(
        layers * rates.pass_seconds(moved, 4), rel=0.1
    )


def test_modules_named_by_a_row_run_again() -> None:
    """Up-projections of latent attention and experts' activations, and nothing else but views of
    them, which attention takes: their results are discarded."""
    row = {**MIXTRAL, "model": "DeepSeek-V3", "recompute": "selective: mla_up_proj, moe_act"}
    run, _, _ = run_of(row)
    plan = plan_of(run, transformer_of(run), devices_per_node=8)
    graph = build_transformer(transformer_of(run))
    again = {
        op.module
        for chosen in plan.recomputed
        for op in graph.classes[chosen.class_index].ops
        if op.name in chosen.ops and family_of(op.target).view is None
    }
    parts = ("q_up", "kv_up", "rotary")
    assert again == {f"self_attention.{part}" for part in parts} | {"mlp.experts.act"}


def test_selective_recomputation_by_op_keeps_every_second_product() -> None:
    run, _, _ = run_of({**ROWS["fsdp"], "recompute": "selective"})
    plan = plan_of(run, transformer_of(run), devices_per_node=8)
    layer = build_transformer(transformer_of(run)).classes[1]
    (again,) = (chosen.ops for chosen in plan.recomputed if chosen.class_index == 1)
    kept = [op.module for op in layer.ops if op.name not in again]
    assert kept == ["self_attention.qkv", "self_attention.core_attention", "mlp.fc1"]


def test_a_row_says_how_stages_are_dealt() -> None:
    row = {**MIXTRAL, "model": "DeepSeek-V3", "mtp_layers": "1", "pp": "16", "dp": "4", "ep": "4"}
    run, _, _ = run_of({**row, "pp_layout": "Et*4|(t*4|)*14tmL"})
    plan = plan_of(run, transformer_of(run), devices_per_node=8)
    assert [len(stage.blocks) for stage in plan.stages] == [5, *[4] * 14, 3]
    with pytest.raises(PlannerError, match="makes 2 stages of 64 blocks; the row has 16 stages"):
        run_of({**row, "pp_layout": "Et*30|t*31mL"})


NEARLY_FULL = {
    "stack": "nanotron", "gpu": "H100-SXM", "gpu_mem_gb": "80", "gpus": "16", "layers": "32",
    "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn_hidden": "14336", "gated_ffn": "1",
    "vocab": "131072", "seq_len": "4096", "global_batch": "256", "micro_batch": "1", "tp": "1",
    "pp": "2", "dp": "8", "zero_stage": "1", "dtype": "bf16",
}  # fmt: skip


def test_messages_wait_for_an_allocator_that_is_nearly_full() -> None:
    """Live tensors times 1.25 and the context are more than 79 GiB; without that factor they fit.
    33 turns of 2 messages, a quarter second each."""
    run, profile, rates = run_of(NEARLY_FULL)
    prices = RowPrices()
    found = prices.estimate(run, profile, rates)
    room = 79 * 2**30
    assert found.peak_bytes < room
    assert is_nearly_full(found, run, room)
    assert retry_seconds(found, run, room) == pytest.approx(0.25 * 2 * 33)
    assert retry_seconds(found, run, 2 * room) == 0.0
    assert prices.step_seconds(run, profile, rates, room_bytes=room) == pytest.approx(
        found.step_s + 0.25 * 2 * 33
    )
    predicted = predict_row(NEARLY_FULL, prices)
    assert predicted["predicted_fits"] == "nearly full"
    assert predicted["predicted_step_time_s"] == pytest.approx(found.step_s + 0.25 * 2 * 33)


@pytest.mark.parametrize(("gpu", "each_mib"), [("H100-SXM", 32), ("A100-SXM", 4)])
def test_experts_products_have_a_workspace_on_each_stream(gpu: str, each_mib: int) -> None:
    """N7: four of Transformer Engine's, on ranks with experts; dense models have none of them."""
    for row, streams in ((MIXTRAL, 4), ({**LORA, "model": "Llama2-70B"}, 0)):
        run, profile, rates = run_of({**row, "gpu": gpu, "dtype": "bf16"})
        without = replace(run, stack=replace(run.stack, grouped_streams=0))
        held, less = (
            RowPrices().estimate(each, profile, rates).memory[0] for each in (run, without)
        )
        assert held.parameter_bytes - less.parameter_bytes == streams * each_mib * 2**20


def test_layers_on_the_host_keep_nothing_on_the_device() -> None:
    """Half of 80 equal layers: half of what a microbatch keeps, and the same step."""
    row = {"gpu": "GB200", "stack": "megatron-core", "model": "Llama-3-70B", "gpus": "64",
           "zero_stage": "3", "tp": "1", "pp": "1", "dp": "64", "seq_len": "8192", "dtype": "fp8",
           "micro_batch": "2", "global_batch": "128", "recompute": "none"}  # fmt: skip
    here, away = (price_row({**row, "layers_on_host": told}).estimate for told in ("", "40"))
    kept = [float(found.memory[0].activation_bytes) for found in (here, away)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.02)
    assert away.step_s == here.step_s


def test_what_runs_again_is_issued_again() -> None:
    """Norms that run again cost a host that sets the step's pace more than a busy device."""
    row = {"gpu": "H100", "stack": "megatron-core", "gpus": "1", "layers": "12", "hidden": "512",
           "heads": "8", "seq_len": "1024", "micro_batch": "4", "global_batch": "32",
           "dtype": "bf16", "positions": "none"}  # fmt: skip

    def longer_s(**cells: str) -> float:
        none, again = (
            price_row({**row, **cells, "recompute": told}).estimate.step_s
            for told in ("none", "selective: layernorm")
        )
        return (again - none) / (12 * 8)  # layers and microbatches

    run, _, rates = run_of(row)
    regions = 2  # ahead of attention and of the feed-forward
    around = run.stack.region_kernels * regions
    least = around * (rates.issue_s + 2 * rates.issue_back_s)
    assert least < longer_s() < 2 * least
    # A wide layer's device is busy for longer than its host: the norms' bytes, and little more.
    moved_s = 2 * 3 * 4096 * 4 * 8192 * 2 / 2e12
    assert longer_s(hidden="8192", heads="64", seq_len="4096") < moved_s + least / 2


def test_biases_of_experts_are_passes_of_their_own() -> None:
    """Megatron-LM adds them expert by expert, in fp32: 68 bytes an element behind the last product,
    and two ops of the host for each of 8 experts.
    """
    row = {"gpu": "B200", "stack": "megatron-core", "model": "gpt-oss-120b", "layers": "4",
           "gpus": "16", "ep": "16", "dp": "16", "micro_batch": "4", "global_batch": "128",
           "seq_len": "4096", "recompute": "none", "notes": "force-balanced"}  # fmt: skip

    def step_s(**cells: str) -> float:
        return price_row({**row, **cells}).estimate.step_s

    elements = 4 * 4096 * 4 * 2880
    moved_s = 68 * elements / (8e12 * 0.8)
    longer_s = (step_s() - step_s(bias="0")) / (4 * 2)
    assert moved_s < longer_s < 2 * moved_s
    # One kernel, in 16 bits, where a runtime has one.
    assert step_s(stack="torchtitan") - step_s(stack="torchtitan", bias="0") < longer_s * 8 * 0.7
    # Ranks that share each expert's matrices add a bias once.
    assert step_s(tp="2", dp="8", ep="8", etp="2", bias="1") > 0
