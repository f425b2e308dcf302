"""What configuration files say beyond rows of published tables."""

from benchmarks.published import configured
from costmodel.table.rows.devices import device_of
from costmodel.table.rows.run_row import parse_row

BRIDGE = {
    "source_id": "mbridge_26.02", "stack": "megatron-te", "gpu": "B300", "gpus": "256",
    "model": "DeepSeekV3", "seq_len": "4096", "global_batch": "4096", "micro_batch": "1",
    "tp": "1", "pp": "16", "dp": "16", "ep": "8", "vpp": "", "recompute": "", "dtype": "mxfp8",
    "notes": "MoE force-balanced",
}  # fmt: skip


def test_a_recipe_fills_what_its_row_leaves_open():
    run = parse_row(configured.as_configured(BRIDGE))
    assert run.stack.dispatchers == ("hybridep",)
    assert (run.recompute, run.vpp, run.sizes.ahead) == ("selective: mla_up_proj", 1, 1)
    assert run.stage_blocks == (5, *[4] * 14, 3)
    assert run.stack.expert_imbalance == 0
    assert (run.stack.gradient_bytes, run.stack.moment_bytes) == (2, (2, 2))
    other = {**BRIDGE, "source_id": "simumax_b200"}
    assert configured.as_configured(other) == other
    without = configured.as_configured(
        {**BRIDGE, "source_id": "mbridge_25.11", "model": "DeepSeekV3 (w/o MTP)", "gpu": "GB200"}
    )
    assert without["mtp_layers"] == "0"


def test_a_recipe_says_where_dense_models_keep_their_state():
    """Megatron-Bridge at v0.3.0: LLAMA3_70B_PRETRAIN_CONFIG_GB200_FP8_CS_V2 has 40 layers on the
    host; in bf16 the optimizer keeps 16 bits of each master, as NeMo's of 2024 does.
    """

    def said(**cells: str):
        row = {**BRIDGE, "gpu": "GB200", "model": "LLAMA3_70B", "zero_stage": "", "ep": "", **cells}
        return parse_row(configured.as_configured(row)).stack

    sharded = said(zero_stage="3", pp="1", dp="256", dtype="fp8")
    assert (sharded.layers_on_host, sharded.gradient_bytes, sharded.master_bytes) == (40, 2, 4)
    assert said(dtype="bf16").master_bytes == 2
    nemo = said(source_id="dgxc_2411", dtype="fp8")
    assert (nemo.layers_on_host, nemo.gradient_bytes, nemo.master_bytes) == (0, 2, 2)


def test_what_earlier_rows_added_holds_for_later_ones():
    def said(step: str, dispatcher: str):
        row = {**BRIDGE, "source_id": "moecp_Megatron-LM", "gpu": "GB200", "pp": "8", "vpp": "4",
               "dp": "32", "ep": "32",
               "notes": f"cumulative optimisation: {step} dispatcher {dispatcher}"}  # fmt: skip
        return parse_row(configured.as_configured(row))

    first, last = said("baseline", "alltoall"), said("quantize fused into norm", "HybridEP")
    assert first.recompute == "selective: mlp, mla_up_proj"
    assert last.recompute == "selective: mlp"
    assert last.stack.forward_kernels < first.stack.forward_kernels
    assert (first.stack.dispatchers, last.stack.dispatchers) == (("alltoall",), ("hybridep",))
    # A graph of the shared expert is no graph of the whole layer.
    assert said("CUDA graph captures shared expert", "DeepEP").stack.expert_kernels > 0


def test_torchtitans_files_say_lengths_and_torchaos_gpus_are_its():
    titan = {**BRIDGE, "source_id": "torchtitan_202412", "seq_len": "", "gpu": "H100-SXM"}
    assert configured.as_configured(titan)["seq_len"] == "8192"
    assert configured.as_configured({**titan, "seq_len": "32768"})["seq_len"] == "32768"
    largest = {**titan, "source_id": "torchtitan_perf_2024", "model": "Llama3.1-405B"}
    assert "compile" in configured.as_configured(largest)["notes"]
    ao = configured.as_configured({**titan, "source_id": "moecp_ao"})
    assert device_of(ao["gpu"], float(ao["gpu_mem_gb"])).memory_tb_per_s == 2.4
