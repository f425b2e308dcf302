"""B16: peak memory of a Megatron-LM command line within 3%, by its own regression runs.

MiB that were allocated at most on the rank that prints it, the last: NVIDIA/Megatron-LM at
d98e8a64ddf3, tests/functional_tests/test_cases/{gpt,moe,bert,t5}/*/golden_values_dev_dgx_*.json
(mem-max-allocated-bytes), 8 GPUs each. Most are so small that workspaces and copies show.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published import PUBLISHED, intervals
from costmodel.table.rows.rows import PricedRow, price_row
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_refusals import refusals
from planner.emit.megatron_row import row_of
from planner.emit.megatron_rules import Run, broken_rules
from planner.units import MIB

GOLDENS = PUBLISHED / "megatron_goldens.csv"

SMALL = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --bf16 "
    "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 "
    "--attention-softmax-in-fp32 --no-gradient-accumulation-fusion"
)
EXACT = f"{SMALL} --deterministic-mode"
UNFUSED = f"{EXACT} --attention-backend unfused"
OF_8 = (
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 8 "
    "--sequence-parallel --moe-router-topk 1 --disable-bias-linear --no-bias-gelu-fusion "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --moe-grouped-gemm "
    "--moe-router-load-balancing-type sinkhorn"
)
SEVEN_B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --untie-embeddings-and-output-weights --micro-batch-size 1 "
    "--global-batch-size 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 131073 "
    "--tokenizer-type NullTokenizer --bf16 --pipeline-model-parallel-size 4 --deterministic-mode "
    "--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --no-gradient-accumulation-fusion"
)
NARROW = (
    f"{EXACT.replace('size 4', 'size 2').replace('size 32', 'size 128')} --normalization RMSNorm "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--tp-comm-overlap --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather "
    "--use-distributed-optimizer"
)
BERT = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 "
    "--global-batch-size 128 --seq-length 512 --max-position-embeddings 512 --deterministic-mode "
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --bf16 "
    "--attention-backend unfused"
)
T5 = (
    "--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 "
    "--ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --bf16 "
    "--max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 "
    "--vocab-extra-ids 100 --tokenizer-type BertWordPieceCase --deterministic-mode"
)
TWO_BY_TWO = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
DEEP = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
UNEVEN = (
    "--pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights "
    "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"
)


@pytest.mark.skipif(not GOLDENS.exists(), reason="needs tables of published runs")
def test_nine_of_ten_regression_runs_are_within_8_percent():
    """Of 327 with a known number of devices: the median is under 1%, and B16's 3% hold for nearly
    nine of ten. Of six the fused loss made more copies once, three loaded a checkpoint.
    """
    runs = intervals.golden_runs(GOLDENS)
    errors = np.abs([run.error for run in runs])
    assert len(errors) >= 320
    assert np.median(errors) < 0.01
    assert (errors < 0.03).mean() > 0.88
    assert np.quantile(errors, 0.9) < 0.04
    assert (errors > 0.09).sum() <= 9
    of_core = np.abs([run.error for run in runs if run.runtime == "megatron-core"])
    assert np.quantile(of_core, 0.9) < 0.04


def priced(flags: str, gpu: str) -> PricedRow:
    run = Run(flags=parse_flags(flags), num_devices=8, model={})
    assert not broken_rules(run)
    assert not refusals(run)
    return price_row({name: str(value) for name, value in row_of(run, {}, "", gpu).items()})


@pytest.mark.parametrize(
    ("flags", "gpu", "measured_mib"),
    [
        # A workspace of torch's products for each thread, and Transformer Engine's own.
        (f"{UNFUSED} {DEEP}", "H100", 3968),
        (f"{UNFUSED} {DEEP}", "A100", 3932),
        (f"{UNFUSED} {UNEVEN}", "H100", 2304),
        # Layers of Megatron-LM's own: no such workspace, and a buffer of scores.
        (f"{EXACT} --transformer-impl local --pipeline-model-parallel-size 2", "H100", 3465),
        (f"{EXACT} --transformer-impl local --pipeline-model-parallel-size 4", "A100", 2621),
        (
            f"{EXACT.replace('--bf16', '--fp16')} --transformer-impl local {TWO_BY_TWO} "
            "--no-masked-softmax-fusion",
            "A100",
            1990,
        ),
        # cuDNN's attention on H100; a portable kernel elsewhere, whose result is copied.
        (f"{EXACT} {TWO_BY_TWO}", "H100", 1362),
        (f"{EXACT} {TWO_BY_TWO}", "A100", 1345),
        (f"{EXACT} {TWO_BY_TWO}", "GB200", 1373),
        # Not deterministic, smaller workspaces but on Hopper.
        (f"{SMALL} {TWO_BY_TWO}", "H100", 1361),
        (f"{SMALL} {TWO_BY_TWO}", "A100", 1299),
        # A microbatch a step: sums of gradients are there all the same.
        (f"{EXACT} --use-distributed-optimizer", "A100", 2586),
        # Attention keeps copies of keys and values, and not what they were made in together.
        (SEVEN_B, "A100", 57687),
        (SEVEN_B, "GB200", 57716),
        (f"{EXACT} --pipeline-model-parallel-size 2 --position-embedding-type rope", "A100", 2476),
        # Three workspaces where products are cut to run beside collectives.
        (NARROW, "H100", 843),
        # BERT, and T5 of two lengths, whose layers attend to another sequence besides.
        (f"pretrain_bert.py {BERT}", "H100", 5049),
        (f"pretrain_t5.py {T5} --transformer-impl local", "A100", 5903),
        (
            f"pretrain_t5.py {T5} --attention-backend unfused --tensor-model-parallel-size 4",
            "A100",
            1738,
        ),
        # Rows of experts are weighed inside of them.
        (f"{UNFUSED} {OF_8}", "A100", 2966),
        (f"{UNFUSED} {OF_8}", "H100", 3148),
    ],
)
def test_memory_is_what_megatrons_own_runs_allocate(flags, gpu, measured_mib):
    last = priced(flags, gpu).estimate.memory[-1]
    assert float(last.tensor_bytes) / MIB == pytest.approx(measured_mib, rel=0.024)


@pytest.mark.parametrize(
    ("flags", "gpu", "measured_mib"),
    [
        # Deterministic: scores are written out before flash-attn 2.4.1, but on Hopper.
        (f"{EXACT} {TWO_BY_TWO}", "A100", 1812),
        (f"{EXACT} {DEEP} --use-distributed-optimizer", "A100", 3731),
        # Not so: its fused attention, as today.
        (f"{SMALL} {TWO_BY_TWO}", "A100", 1297),
    ],
)
def test_software_of_2024_has_no_fused_attention_for_deterministic_runs(flags, gpu, measured_mib):
    """golden_values_lts_dgxa100_dracooci.json of NGC 24.01, MiB."""
    run = Run(flags=parse_flags(flags), num_devices=8, model={})
    row = {name: str(value) for name, value in row_of(run, {}, "", gpu).items()}
    row["stack"] = "megatron-core-te1"
    memory = price_row(row).estimate.memory[-1]
    assert float(memory.tensor_bytes) / MIB == pytest.approx(measured_mib, rel=0.01)
    on_hopper = price_row(row | {"gpu": "H100"}).run.stack
    assert on_hopper.flash_attention
