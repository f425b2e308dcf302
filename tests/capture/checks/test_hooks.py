"""What hangs on a module and a graph would lose is refused; what it keeps is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.capture.checks.hooks import refuse_lost, saved_tensors_untouched, tensor_hooks
from planner.errors import CaptureError


def on_a_parameter(module):
    module.weight.register_hook(lambda grad: grad * 2)


def after_accumulation(module):
    module.weight.register_post_accumulate_grad_hook(lambda param: None)


def on_a_modules_backward(module):
    module.register_full_backward_hook(lambda *_: None)


def on_a_lazy_module(module):
    module.lazy = nn.LazyLinear(2)


def in_the_same_memory(module):
    module.part = nn.Parameter(module.weight.detach()[:2])


def holding(tensor):
    return lambda module: module.register_buffer("held", tensor)


JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (on_a_parameter, r"parameter weight has a hook .*test_hooks\.py"),
        (after_accumulation, "parameter weight has a hook"),
        (on_a_modules_backward, r"module model\(\) \(Linear\) has a hook"),
        (on_a_lazy_module, r"parameter lazy\.weight has no shape yet"),
        (
            holding(torch.eye(2).to_sparse()),
            r"buffer held is a sparse_coo tensor of shape \[2, 2\]",
        ),
        (holding(JAGGED), "buffer held is a nested tensor, .* filled up to the longest"),
        (lambda module: setattr(module, "own", JAGGED), "attribute own is a nested tensor"),
        (in_the_same_memory, "weight and part are two tensors in the same memory"),
    ],
)
def test_what_would_be_lost_is_refused(change, says):
    module = nn.Linear(4, 4)
    change(module)
    with pytest.raises(CaptureError, match=says):
        refuse_lost(module)


def test_what_a_graph_keeps_is_not_refused():
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda module, args, output: output * 2)
    module.tied = module.weight
    halves = torch.ones(8)
    module.register_buffer("a", halves[:4])
    module.register_buffer("b", halves[4:])  # side by side, without overlap
    module.register_buffer("c", halves[:2])  # buffers that nothing trains may share
    refuse_lost(module)
    assert tensor_hooks(module.weight) == []


def test_changing_what_autograd_saves_is_refused_but_for_torchs_own_ways():
    x = torch.ones(2, requires_grad=True)
    with saved_tensors_untouched():
        with torch.autograd.graph.save_on_cpu():
            x.exp()
        with (
            pytest.raises(CaptureError, match="changes what autograd saves"),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            pass
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x.exp()  # as before, outside
