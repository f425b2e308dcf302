"""Benchmarks of published parts of steps: what they read of a row, what they hold it against."""

import pytest

from benchmarks.published.layouts import mixed_runs
from benchmarks.published.parts import interference, op_profiles

HEADER = (
    "gpu,nodes,gpus_per_node,intra_group,inter_group,world,gemm_n,gemm_m,gemm_k,nccl_mb,h2d_mb,"
    "d2h_mb,latency_ms"
)


def test_parts_that_met_are_held_against_each_alone(tmp_path):
    """A product of 20 ms and a message of 10: of the message 0.66 shows on an A100."""
    rows = [(512, 64, 0, 25.0), (512, 0, 0, 20.0), (0, 64, 0, 9.0), (0, 64, 0, 11.0),
            (512, 0, 8, 21.0)]  # fmt: skip
    path = tmp_path / "rows.csv"
    lines = [f"a100-sxm4-40gb,1,8,2,1,8,{n},64,64,{m},{c},0,{t}" for n, m, c, t in rows]
    path.write_text("\n".join([HEADER, *lines]))
    (meeting,) = interference.load_meetings(path)  # a copy was never measured alone
    assert meeting.name == "product + collective"
    assert meeting.alone_s == pytest.approx((0.02, 0.01, 0, 0))
    assert meeting.predicted_s(0.66) == pytest.approx(0.0266)
    assert interference.unhidden_part([meeting]) == pytest.approx(0.5)
    (line,) = interference.table([meeting])
    assert (line["over_longest"], line["links"]) == (pytest.approx(1.25), "in a node")


def test_copies_hide_behind_what_is_longer():
    meeting = interference.Meeting(
        gpu="a100-sxm4-40gb", between_nodes=False, alone_s=(0.02, 0.03, 0.01, 0.05), measured_s=1
    )
    assert meeting.predicted_s(0.5) == pytest.approx(0.05)
    assert meeting.predicted_s(0.1) == pytest.approx(0.05)
    assert meeting.name == "product + collective + up + down"


def test_sizes_follow_from_megabytes():
    """A layer of a 13B model on one sample of 4096 tokens."""
    rows = {
        "enc-attention-qkv": {"weights_mb": "150.0"},
        "enc-1st-layernorm": {"input_mb": "40.0"},
        "enc-attention-softmax": {"activations_mb": "1280.0"},
    }
    sizes = op_profiles.sizes_of(rows, 1)
    assert sizes == op_profiles.Sizes(samples=1, hidden=5120, heads=40, length=4096)
    assert sizes.stream == 40 * 2**20
    assert sizes.scores == 1280 * 2**20


RUN = {
    "model": "OPT-350", "gpu_types": "GH-96|GH-96", "gpus": "16", "pp": "2", "dp": "2|2",
    "tp": "4", "layers_per_stage": "12|14", "micro_batch": "8", "global_batch": "64",
    "iteration_s": "1.4", "grad_allreduce_s": "0.02", "cluster": "clariden", "nodes": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"gpu_types": "RTX-3090|Titan-RTX"}, "no data sheet of its devices"),
        ({"gpu_types": "GH-96+RTX-3090|GH-96"}, "no data sheet of its devices"),
        ({"iteration_s": "0.02"}, "its step time is that of its all-reduce"),
        ({"layers_per_stage": "12|13"}, "its stages are not the model's layers"),
    ],
    ids=str,
)
def test_runs_that_an_estimate_cannot_say_are_left_out(changed, why):
    found = mixed_runs.refusal({**RUN, **changed}, None)
    assert found is None if why is None else found.startswith(why)


def test_a_run_has_the_stages_it_names():
    """The slower of two stages sets the step: with the head, 14 blocks take longer than 12."""
    step_seconds = mixed_runs.step_seconds
    even, uneven = step_seconds(RUN, None), step_seconds({**RUN, "layers_per_stage": "4|22"}, None)
    assert uneven > 1.3 * even
