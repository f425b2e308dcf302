"""Weight gradients made by products of ours are autograd's, wherever and whenever they are made.

P15, G13: the gradient that another rank waits for leaves before the weight gradients that were
put aside are made.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.ops.kernel import LARGE_BYTES
from planner.language.plan import Plan
from planner.runtime.stage.weight_grads import WeightProduct, WeightQueue
from planner.runtime.step.executor import Executor
from planner.runtime.step.messages.p2p import Message
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, sgd
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks

IN, OUT = 512, LARGE_BYTES // 512 // 8  # of the size from which products add, in fp64


def gradients(
    way: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    transposed: bool,
    hook: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Gradients of x, weight and bias after three microbatches."""
    torch.manual_seed(0)
    weight = torch.randn(*((OUT, IN) if transposed else (IN, OUT)), dtype=dtype)
    weight, bias = nn.Parameter(weight), nn.Parameter(torch.randn(OUT, dtype=dtype))
    moved = torch.zeros_like(weight)
    if hook:

        def take(param: Tensor) -> None:
            moved.add_(param.grad)
            param.grad = None

        weight.register_post_accumulate_grad_hook(take)
    found = []
    for _ in range(3):
        x = torch.randn(2, 3, IN, dtype=dtype, requires_grad=True)
        way(x, weight, bias).abs().square().sum().backward()
        found.append(x.grad)
    if isinstance(way, Late):
        way.flush()
    return [*found, moved if hook else weight.grad, bias.grad]


class Late:
    """Products whose weight gradients wait for `flush`."""

    def __init__(self, *, transposed: bool) -> None:
        self.queue = WeightQueue()
        self.product = WeightProduct(self.queue, transposed=transposed)

    def __call__(self, *inputs: Tensor) -> Tensor:
        with self.queue.collecting((0, 0)):
            return self.product(*inputs)

    def flush(self) -> None:
        self.queue.flush((0, 0))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_are_autograds(transposed, hook, dtype):
    """With a hook that takes each gradient elsewhere, as for fp32 masters, too; and for complex
    numbers, whose gradients read conjugates.
    """

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ (weight.t() if transposed else weight) + bias

    settings = {"transposed": transposed, "hook": hook, "dtype": dtype}
    expected = gradients(plain, **settings)
    at_once = WeightProduct(WeightQueue(), transposed=transposed)
    for way in (at_once, Late(transposed=transposed)):
        for ours, theirs in zip(gradients(way, **settings), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_the_sum_is_added_to_in_place():
    weight = nn.Parameter(torch.randn(OUT, IN, dtype=torch.float64))
    weight.grad = torch.zeros_like(weight)
    given = weight.grad
    product = WeightProduct(WeightQueue(), transposed=True)
    product(torch.randn(4, IN, dtype=torch.float64), weight).sum().backward()
    assert weight.grad is given
    assert given.abs().sum() > 0


class Biased(nn.Module):
    """A product whose bias has a dim more than outputs, or one number for all of them."""

    def __init__(self, sizes: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(IN, 2 * OUT) / IN**0.5)  # in fp32
        self.bias = nn.Parameter(torch.randn(sizes))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight).tanh().mean()


@pytest.mark.parametrize("sizes", [(1, 2 * OUT), (1,)])
def test_a_bias_of_another_shape_than_outputs(sizes):
    """Products of ours sum a gradient of outputs; such a bias leaves its product to autograd."""
    two, three, batch = ((torch.randn(n, IN),) for n in (2, 3, 4))
    module = Biased(sizes)
    plan = default_plan(capture_module(module, two, three), microbatch_size=2, num_microbatches=2)
    alone = OneProcess(module, sgd)
    engine = planner.apply(plan, module, optimizer=sgd(module))
    assert engine.step(batch).item() == pytest.approx(alone.step(batch), rel=1e-6)
    found = engine.full_gradients()
    for name, gradient in alone.gradients().items():
        torch.testing.assert_close(found[name], gradient)
    engine.close()


def waiting_when_sent(plan: Plan) -> list[int]:
    """How many weight gradients were waiting as each input gradient was sent."""
    tiny, module = build("deep-gpt")
    engine = planner.apply(plan, module)
    queue, post = engine._lowered.weight_queue, engine._executor._post
    assert queue is not None
    seen: list[int] = []
    put = post.put

    def putting(message: Message, tensor: Tensor) -> None:
        if message.is_grad:
            seen.append(sum(map(len, queue._pending.values())))
        put(message, tensor)

    post.put = putting
    engine.step(tiny.batch(plan.global_batch))
    return seen


def waiting_by_plan(plans: list[Plan]) -> list[list[int]]:
    return [waiting_when_sent(plan) for plan in plans]


def test_the_gradient_that_another_rank_waits_for_leaves_first():
    """In each backward before the weight gradients of the first block, in the last before all;
    not where a stage is recomputed, whose activations should not live longer.
    """
    plans = [
        default_plan(capture("deep-gpt"), pp=2, num_microbatches=3, recompute=recompute)
        for recompute in ("none", "full")
    ]
    first, last = run_ranks(waiting_by_plan, 2, plans)
    assert first == [[], []]
    of_block, again, of_stage = last[0]
    assert 0 < of_block == again < of_stage
    assert last[1] == [0, 0, 0]


def posted_ahead(plan: Plan) -> int:
    """The most messages of this rank under way to it at once, when a job begins."""
    tiny, module = build("gpt")
    engine = planner.apply(plan, module)
    most = 0
    do = Executor._do

    def doing(self: Executor, *args: object) -> None:
        nonlocal most
        most = max(most, len(self._post._posted))
        do(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "_do", doing)
        engine.step(tiny.batch(plan.global_batch))
    return most


def posted_by_choice(plans: list[Plan]) -> list[int]:
    return [posted_ahead(plan) for plan in plans]


def test_receives_are_posted_as_far_ahead_as_the_plan_says():
    """P15: an option of the plan; each message posted ahead is a buffer."""
    plan = default_plan(capture("gpt"), pp=2, num_microbatches=6, schedule="fthenb")
    plans = [plan.model_copy(update={"receive_ahead": n}) for n in (0, 1, 3)]
    _, last = run_ranks(posted_by_choice, 2, plans)
    # The job's own message is always posted.
    assert last == [1, 2, 4]
