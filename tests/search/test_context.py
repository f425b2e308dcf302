"""N8: cp in the space: sequences are divided where that is the best plan, and where asked (D19)."""

import pytest

from planner.errors import LayoutError
from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.partition.chain_dp import solve_chain
from search.priced_configuration import PricedConfiguration
from tests.captures import capture_tiny, capture_wide_llama
from tests.search.machine import Machine

LENGTH = 32768
MACHINE = Machine(context_bytes=0.0, devices_per_node=8)


@pytest.fixture(scope="module")
def gpt():
    return capture_tiny("gpt")


@pytest.fixture(scope="module")
def long_llama():
    """Two layers of one key-value head on sequences of 32,768; only its shapes exist."""
    return capture_wide_llama(
        LENGTH,
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=1,
        intermediate_size=2048,
    )


def ask(gpus=4, batch=8, **choices):
    return SearchRequest(num_devices=gpus, global_batch=batch, **choices)


def test_long_sequences_are_divided_unasked(long_llama):
    """One sample a step on four devices: gathering keys and values of one head costs less than
    what tp sends, so cp is best; with a sample for each device dp is."""
    result = find_plan(long_llama, MACHINE, ask(4, 1))
    plan = result.plan
    assert (plan.cp, plan.tp) == (4, 1)
    assert {layout.axis for layout in plan.layouts} == {"cp"}
    assert result.certificate.gap == 0
    for choices in ({"cp": 1}, {"cp": 2}):
        fixed = find_plan(long_llama, MACHINE, ask(4, 1, **choices)).plan
        assert fixed.cp == choices["cp"]
        assert fixed.estimate["step_s"] > plan.estimate["step_s"]
    assert find_plan(long_llama, MACHINE, ask(4, 4)).plan.dp == 4


def test_short_sequences_are_divided_only_when_asked(gpt):
    """D19, V11: cp=2 of 16 positions is honoured, never taken by itself."""
    assert find_plan(gpt, MACHINE, ask()).plan.cp == 1
    for choices in ({"cp": 2}, {"allow": (("cp", "2"),)}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}):
        result = find_plan(gpt, MACHINE, ask(**choices))
        assert result.plan.cp == 2
        assert result.plan.dp * result.plan.cp * result.plan.tp * result.plan.pp == 4
        assert all("cp 2" in runner_up.label for runner_up in result.runners_up)
        certificate = result.certificate
        total = certificate.evaluated + sum(n for _, n in certificate.pruned)
        assert certificate.considered == total + certificate.unexplored


@pytest.mark.parametrize(
    "choices",
    [{"cp": 2, "pp": 2}, {"cp": 2, "tp": 2}, {"cp": 4, "zero": 1}, {"cp": 2, "dp": 2, "zero": 3}],
)
def test_the_quick_price_of_cp_is_the_estimate(gpt, choices):
    """So that what it prunes the estimate would not have taken."""
    request = ask(4, 16, recompute="none", **choices)
    candidates = Candidates.of(gpt, MACHINE, request)
    configuration = next(candidates.shapes(request)[0].configurations())
    for table in candidates.tables(
        configuration.tp, configuration.microbatch_size, configuration.cp
    ):
        priced = PricedConfiguration(candidates, configuration, table)
        problem = priced.problem(float("inf"))
        cut = solve_chain(problem).cut
        answer = candidates.estimate(priced.plan(cut))
        assert priced.quick_step_s(cut) == pytest.approx(answer.step_s, rel=1e-9)
        assert cut.value <= answer.step_s * (1 + 1e-9)


def test_what_cp_cannot_divide_is_named(gpt):
    """D19, V11: the block and its tensor, whether by length or by kind."""
    with pytest.raises(LayoutError, match=r"cp=3 divides sequences, and block .* hands on .*16"):
        find_plan(gpt, MACHINE, ask(3, 6, cp=3))
    with pytest.raises(LayoutError, match=r"it is not \[batch, sequence, hidden\]; use cp=1"):
        find_plan(capture_tiny("mlp"), MACHINE, ask(2, 8, cp=2))
