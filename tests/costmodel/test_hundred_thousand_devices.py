"""B18: a mixture of a trillion parameters on 131,072 devices, priced in seconds.

Kimi-K2's sizes (config.json of moonshotai/Kimi-K2-Instruct: 1T parameters, 32B of them active) as a
line of Megatron-LM's flags. What a rank holds, multiplies and sends is summed by hand here, from
sizes and degrees alone.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import defaultdict

import pytest

from commands.check import check
from costmodel.estimate import cost_cache, estimate
from costmodel.execution.dispatch.imbalance import Imbalance
from costmodel.execution.executed import ExecutedProfile
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import run_of
from costmodel.time.plan_price import price_plan
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_row import row_of
from planner.emit.megatron_rules import Run
from planner.units import MIB
from profiles import load_profile

DEVICES = 131_072
FLAGS = """
--num-layers 61 --hidden-size 7168 --num-attention-heads 64 --ffn-hidden-size 18432
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128
--num-experts 384 --moe-router-topk 8 --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*1+[1]*60) --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-router-force-load-balancing
--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --vocab-size 163840 --tokenizer-type NullTokenizer
--seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0 --bf16
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 16
--context-parallel-size 2 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--micro-batch-size 1 --global-batch-size 65536
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""

# Sizes. h: width, q, c: ranks of queries, and of keys and values; a: heads, n, r, v: a head's width
# without positions, with them, and of values; f, d: widths of an expert and of the dense layer.
h, q, c, a, n, r, v, f, d = 7168, 1536, 512, 64, 128, 64, 128, 2048, 18432
EXPERTS, PICKED, VOCAB, TOKENS = 384, 8, 163_840, 4096
# Degrees. A stage has tp * cp * dp = 8,192 ranks, and each expert lies on edp of them.
TP, CP, PP, DP, EP, MICROBATCHES = 2, 2, 16, 2048, 64, 32
REPLICAS, EXPERT_REPLICAS = DP * CP, TP * CP * DP // EP
# Of a microbatch (a sample) a rank has the rows of its cp part; between products of tp, a half.
ROWS = TOKENS // CP
OWN = ROWS // TP
BF16 = 2
LAYERS = (3, *[4] * 14, 2)
"""Of each stage; the first of the first stage is dense."""


def dense_params(stage: int) -> int:
    """Parameters of a rank that all replicas hold: tp halves products, but not what makes the
    small latent vectors, the router and norms.
    """
    attention = (
        q * h + a * (n + r) * q // TP + (c + r) * h + a * (n + v) * c // TP + h * a * v // TP
    )
    layer = attention + 2 * h + q + c
    mixture = EXPERTS * h + 3 * h * f // TP
    ends = {0: VOCAB * h // TP, PP - 1: VOCAB * h // TP + h}.get(stage, 0)
    first = 3 * h * d // TP - mixture if stage == 0 else 0
    return LAYERS[stage] * (layer + mixture) + first + ends


def expert_params(stage: int) -> int:
    """Parameters of a rank's six experts a layer."""
    return (LAYERS[stage] - (stage == 0)) * EXPERTS // EP * 3 * h * f


def forward_flop(stage: int) -> tuple[int, int]:
    """Flop of a rank's products for a microbatch, and of its causal attention: each query meets
    half of all keys.
    """
    attention = (
        2 * OWN * h * (q + c + r) + 2 * ROWS * (q * a * (n + r) + c * a * (n + v) + a * v * h) // TP
    )
    # Experts get as many rows as the rank sends: eight for each of its own.
    mixture = 2 * OWN * h * EXPERTS + 2 * 3 * OWN * PICKED * h * f + 2 * 3 * ROWS * h * f // TP
    scores = 2 * (n + r + v) * ROWS * (TOKENS // 2) * a // TP
    first = 2 * 3 * ROWS * h * d // TP - mixture if stage == 0 else 0
    head = 2 * ROWS * h * VOCAB // TP if stage == PP - 1 else 0
    return LAYERS[stage] * (attention + mixture) + first + head, LAYERS[stage] * scores


def row(devices: int = DEVICES) -> dict[str, str]:
    flags = FLAGS.replace("65536", str(65536 * devices // DEVICES))
    run = Run(flags=parse_flags(flags), num_devices=devices, model={})
    return {name: str(value) for name, value in row_of(run, {}, "", "H100").items()}


def priced(devices: int = DEVICES):
    plan, costs = RowPrices().plan(*run_of(row(devices)))
    return plan, costs, estimate(costs.graph, costs.profile, plan, costs=costs)


@pytest.fixture(scope="module")
def step():
    return priced()


@pytest.fixture(scope="module")
def price(step):
    plan, costs, _ = step
    return price_plan(plan, costs)


def test_the_model_is_of_a_trillion_parameters():
    """Of the sums below, before anything is held to them: the card says 1T, 32B of them active."""
    # (With the few small matrices counted twice that tp ranks have whole.)
    number = sum(dense_params(s) * TP + expert_params(s) * EP for s in range(PP))
    assert number == pytest.approx(1.03e12, rel=0.01)
    products = sum(forward_flop(s)[0] for s in range(PP)) * TP * CP / (2 * TOKENS)
    assert products + VOCAB * h == pytest.approx(32.8e9, rel=0.01)


def test_bytes_of_each_rank(step, price):
    """Weights, sums of gradients in fp32, and Adam's three fp32 numbers over the replicas."""
    _, _, found = step
    for s, parts in enumerate(found.memory):
        dense, experts = dense_params(s), expert_params(s)
        assert price.load.spread_bytes[s] == BF16 * experts
        assert price.load.param_bytes[s] == BF16 * (dense + experts)
        assert parts.gradient_bytes == 4 * (dense + experts)
        own = dense / REPLICAS + experts / EXPERT_REPLICAS
        assert parts.optimizer_bytes == pytest.approx(12 * own, rel=1e-4)


def test_activations_of_the_microbatches_in_flight(step):
    """A rank has run pp - rank forwards ahead, and keeps of each the inputs of its layers, with the
    layers' own rows of two rotary tables; besides the message that it sends.
    """
    _, _, found = step
    message, tables = OWN * h * BF16, 2 * ROWS * r * BF16
    for s in range(1, 13):
        kept = (PP - s) * LAYERS[s] * (message + tables) + message
        assert found.memory[s].activation_bytes == pytest.approx(kept, rel=1e-6)


def test_no_rank_is_given_the_batch_of_all(step):
    """Tokens and labels of a microbatch, 8 bytes each, and at the ends its mask."""
    _, _, found = step
    mask = TOKENS * TOKENS // CP
    given = 2 * 8 * TOKENS
    assert [m.batch_bytes for m in found.memory] == [given + mask, *[given] * 14, given + mask]
    # Seven workspaces of products beside weights, and two rotary tables.
    weights = BF16 * (dense_params(1) + expert_params(1)) + 7 * 32 * MIB + 2 * TOKENS * r * BF16
    assert found.memory[1].parameter_bytes == pytest.approx(weights, rel=1e-4)


def test_flop_of_each_rank(step, price):
    """A backward multiplies twice what a forward does, and attention 2.5 times, as it makes its
    scores again; pointwise ops add less than a thousandth.
    """
    _, _, found = step
    whole = 0
    for s in range(PP):
        products, scores = forward_flop(s)
        assert price.times.forward_flop[s] == pytest.approx(products + scores, rel=1e-3)
        backward = 2 * products + 2.5 * scores
        assert price.times.backward_flop[s] == pytest.approx(backward, rel=1e-3)
        whole += products + scores + backward
    assert found.flop == pytest.approx(whole * TP * CP * DP * MICROBATCHES, rel=1e-3)


def test_bytes_that_ranks_exchange(monkeypatch):
    """What each collective carries, and among how many: whole tensors of gathers and scatters."""
    sent = defaultdict(set)
    answer = ExecutedProfile.collective_seconds

    def recorded(self, kind, num_bytes, group):
        sent[kind, group.size].add(int(num_bytes))
        return answer(self, kind, num_bytes, group)

    monkeypatch.setattr(ExecutedProfile, "collective_seconds", recorded)
    price_plan(*RowPrices().plan(*run_of(row())))

    # Rows to experts and back: eight for each of a rank's own.
    assert sent["all_to_all", EP] == {OWN * PICKED * h * BF16}
    # From stage to stage a rank's own rows.
    assert sent["send_recv", 2] == {OWN * h * BF16}
    # Gradients of all replicas in fp32, and weights in bf16: of the first stage, inner ones, the
    # last. Experts' go over their own replicas alone.
    dense = {dense_params(s) for s in (0, 1, PP - 1)}
    experts = {expert_params(s) for s in (0, 1, PP - 1)}
    assert sent["reduce_scatter", REPLICAS] == {4 * number for number in dense}
    assert sent["all_gather", REPLICAS] == {BF16 * number for number in dense}
    assert sent["reduce_scatter", EXPERT_REPLICAS] == {4 * number for number in experts}
    assert sent["all_gather", EXPERT_REPLICAS] == {BF16 * number for number in experts}
    # Between two ranks of tp: rows of a microbatch, and the latent vectors; of cp: keys and values.
    latent = {ROWS * q * BF16, ROWS * c * BF16}
    ring = CP * ROWS * a // TP * (n + r + v) * BF16
    assert {ROWS * h * BF16, *latent, ring} <= sent["all_gather", 2]
    assert {ROWS * h * BF16, *latent, ring} == sent["reduce_scatter", 2]
    assert {len(sizes) for (_, ranks), sizes in sent.items() if ranks > 64} <= {2, 3}


def test_a_minute_is_enough_and_nothing_grows_with_the_ranks(capsys):
    """The command line; then the memory of pricing, beside that of a sixteenth of the devices."""
    begun = time.process_time()
    assert check(FLAGS, gpus=DEVICES, as_json=True) == 0
    assert time.process_time() - begun < 60
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] == "yes"
    assert told["peak_bytes"] < 16e9
    assert 3 < told["step_s"] < 12

    peaks = []
    for devices in (DEVICES, DEVICES // 16):
        priced(devices)  # what is kept between calls is made
        tracemalloc.start()
        priced(devices)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A list of the ranks takes 8 bytes for each, whatever lies behind them.
    assert peaks[0] - peaks[1] < 4 * (DEVICES - DEVICES // 16)


def test_our_own_runtime_is_priced_there_as_fast(step):
    """The estimate that a search has of a plan, of the same one. Ranks of cp gather keys here, and
    the last has more pairs than the mean.
    """
    plan, costs, theirs = step
    even = Imbalance(sigma=0.0)
    begun = time.process_time()
    profile = load_profile("h100-sxm5-80gb")
    found = cost_cache(costs.graph, profile, plan.world_size, imbalance=even)
    ours = estimate(costs.graph, profile, plan, costs=found)
    assert time.process_time() - begun < 30
    assert theirs.flop < ours.flop < 1.05 * theirs.flop
    assert ours.step_s == pytest.approx(theirs.step_s, rel=0.5)
