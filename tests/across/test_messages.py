"""N1: plans that cut a batch across which the model computes are refused, and by what name not."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import planner
from planner.capture.module import capture_module
from planner.errors import LayoutError, PlanError
from planner.language.across import blocks_across_samples
from planner.language.across.cut.whole_batch import accepted_messages, refuse_cut
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, load_plan, save_plan
from planner.language.plan.accepted import ACCEPTED
from tests.across import constructs
from tests.across.constructs import Body, batch
from tests.referees.batches import used_parts
from tests.spawn import run_ranks


def graph_of(body: Body) -> ModelGraph:
    return capture_module(used_parts(body), batch(2), batch(3))


def refusal(graph: ModelGraph, plan: Plan, **settings: bool) -> str:
    """Return the line that refuses a plan; nothing where none does."""
    try:
        refuse_cut(graph, plan, **settings)
    except PlanError as error:
        return str(error)
    return ""


def told(body: Body, **settings: bool) -> str:
    """Return the same of a plan that cuts the batch, without where it cuts it."""
    graph = graph_of(body)
    whole = default_plan(graph, microbatch_size=8, num_microbatches=1)
    assert not refusal(graph, whole)
    cut = default_plan(graph, microbatch_size=2, dp=2, num_microbatches=2)
    text = refusal(graph, cut, **settings)
    assert not text or text.startswith(CUT)
    assert "\n" not in text
    return text.removeprefix(CUT)


CUT = "the plan cuts a batch of 8 samples into 4 parts (dp=2, num_microbatches=2): "


def test_an_op_its_user_and_the_line():
    message = told(constructs.where_sum)
    assert message.startswith("values are computed across samples (sum in block ")
    assert "across/constructs.py:" in message
    assert "`return _out(m, torch.where(h.sum() > 0, h, -2 * h), b)`, used by gt), " in message
    assert "and each part has those of its own 2, so training differs from one device; " in message
    assert message.endswith(
        "search again for a plan that keeps the batch whole, or accept it: `accept` local-samples"
    )


def test_a_normaliser_is_told_with_loss_weight():
    message = told(constructs.class_weights)
    assert message.startswith(
        "the loss is divided by a sum over the batch that follows from parameters or draws ("
    )
    assert "loss_weight=" in message
    assert not told(constructs.masked_mean, weighted_loss=True)


def test_a_normaliser_inside_the_model_is_no_matter_of_weights():
    """The share of each expert is used by a product, not by the loss."""
    message = told(constructs.balance_by_counts, weighted_loss=True)
    assert "histc" in message
    assert "used by mul" in message


def test_buffers():
    message = told(constructs.moving_average)
    assert message.startswith("buffers are written from samples (copy_ in block ")
    graph = graph_of(constructs.drawn_walk)
    by_dp = default_plan(graph, microbatch_size=2, dp=2, num_microbatches=1)
    assert not refusal(graph, by_dp)
    in_turn = default_plan(graph, microbatch_size=2, num_microbatches=3)
    message = refusal(graph, in_turn)
    assert (
        "buffers move by numbers that are drawn each time the model runs (copy_ in block "
        in message
    )
    assert "they move 3 times a step instead of once" in message
    assert message.endswith("`accept` local-buffers")


class Layers(nn.Module):
    """Equal layers, each with the mean of the batch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Centred() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y - y.mean(0)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_an_op_that_nothing_is_known_of_is_told():
    message = told(lambda m, b: m.fc(Round.apply(b["x"])).pow(2).mean())
    assert message.startswith("whether these ops compute across samples is not known (Round in ")
    assert "planner verify shows it" in message
    assert message.endswith("`accept` unknown-ops")


def test_equal_blocks_are_told_together():
    graph = capture_module(Layers(), (torch.randn(2, 4),), (torch.randn(3, 4),))
    message = refusal(graph, default_plan(graph, num_microbatches=4))
    assert "mean in blocks layers.0, layers.1, layers.2 and 2 more at " in message
    assert message.count("`return y - y.mean(0)`") == 1
    assert blocks_across_samples(graph) == set(range(5))


def test_a_sum_and_its_use_in_another_block():
    """The op to blame is the reduction, wherever what it gives is used."""

    class Apart(Layers):
        def forward(self, x: Tensor) -> Tensor:
            total = x
            for layer in self.layers:
                x = torch.relu(layer.fc(x))
                total = x.mean(0) if layer is self.layers[0] else total
            return (x * total).pow(2).mean()

    graph = capture_module(Apart(), (torch.randn(2, 4),), (torch.randn(3, 4),))
    message = refusal(graph, default_plan(graph, num_microbatches=4))
    assert "mean in block layers.0 at " in message
    assert "`total = x.mean(0) if layer is self.layers[0] else total`, used by mul" in message
    assert blocks_across_samples(graph) == {0, 4}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (constructs.where_sum, "local-samples"),
        (constructs.moving_average, "local-buffers"),
        (lambda m, b: m.fc(Round.apply(b["x"])).pow(2).mean(), "unknown-ops"),
    ],
    ids=["mixed", "buffer", "unknown"],
)
def test_each_kind_is_accepted_by_its_name_alone(body, name):
    graph = graph_of(body)
    for accept in ACCEPTED:
        plan = default_plan(graph, microbatch_size=2, dp=2, num_microbatches=2, accept=(accept,))
        assert bool(refusal(graph, plan)) == (accept != name)
        messages = accepted_messages(graph, plan)
        assert len(messages) == (accept == name)
        assert all(message.endswith("(accepted)") for message in messages)


def test_a_name_that_accepts_nothing():
    graph = graph_of(constructs.where_sum)
    names = "use local-samples, local-buffers or unknown-ops"
    with pytest.raises(ValueError, match=f"`accept` locals was given; {names}"):
        default_plan(graph, accept=("locals",))
    with pytest.raises(LayoutError, match=f"`accept` local was given; {names}"):
        planner.apply(default_plan(graph), used_parts(constructs.where_sum), accept=["local"])


def test_a_plan_states_what_it_accepts_and_nothing_else(tmp_path):
    graph = graph_of(constructs.where_sum)
    save_plan(default_plan(graph), tmp_path / "plan.json")
    assert '"accept"' not in (tmp_path / "plan.json").read_text()
    accepting = default_plan(graph, accept=("local-samples",))
    save_plan(accepting, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == accepting


def test_apply_refuses_what_neither_it_nor_the_plan_accepts():
    model = used_parts(constructs.class_weights)
    graph = capture_module(model, batch(2), batch(3))
    plan = default_plan(graph, microbatch_size=2, num_microbatches=3)
    with pytest.raises(PlanError, match="the loss is divided by a sum over the batch that follows"):
        planner.apply(plan, model)
    dist.destroy_process_group()
    accepted = plan.model_copy(update={"accept": ("local-samples",)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given, more in (
            (plan, {"accept": ("local-samples",)}),
            (plan, {"loss_weight": lambda part: 1.0}),
            (accepted, {}),
        ):
            planner.apply(given, used_parts(constructs.class_weights), **more)
            dist.destroy_process_group()


def _refused_on(plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        planner.apply(plan, used_parts(constructs.where_sum))
    return str(caught.value)


def test_all_ranks_are_refused_in_the_same_line():
    plan = default_plan(graph_of(constructs.where_sum), dp=2, num_microbatches=2)
    first, second = run_ranks(_refused_on, 2, plan)
    assert first == second
    assert first.startswith("the plan cuts a batch of 4 samples into 4 parts (dp=2, ")
