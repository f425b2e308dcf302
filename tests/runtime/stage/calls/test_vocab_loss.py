"""The loss of a divided vocabulary, as it runs op by op and as a compiled graph holds it."""

import pytest
import torch
import torch.nn.functional as F

from planner.runtime.stage.calls.local_ops import vocab_cross_entropy
from planner.runtime.stage.compiled.trace import _compiling

IGNORED, MEAN = 3, 1


def loss_and_gradient(logits, target, smoothing):
    leaf = logits.clone().requires_grad_()
    loss = vocab_cross_entropy(leaf, target, MEAN, IGNORED, smoothing, "")
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss, gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(6, 11), (6, 11, 2), (11,)], ids=str)
def test_both_forms_are_the_loss_of_all_classes(shape, smoothing):
    torch.manual_seed(0)
    logits = torch.randn(shape, dtype=torch.float64)
    target = torch.randint(11, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if len(shape) > 1:
        target.view(-1)[0] = IGNORED
    before = logits.clone()
    eager = loss_and_gradient(logits, target, smoothing)
    with _compiling():
        held = loss_and_gradient(logits, target, smoothing)
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, target, ignore_index=IGNORED, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(loss, leaf)
    for found in (eager, held):
        torch.testing.assert_close(found, (loss, gradient), rtol=0, atol=1e-12)
    assert torch.equal(eager[1], held[1])
    assert torch.equal(logits, before)  # what is written over is never the model's own


def test_narrow_logits_have_gradients_of_their_dtype():
    logits = torch.randn(6, 11).bfloat16()
    target = torch.arange(6)
    loss, gradient = loss_and_gradient(logits, target, 0.0)
    assert (loss.dtype, gradient.dtype) == (torch.bfloat16, torch.bfloat16)
    wide = loss_and_gradient(logits.float(), target, 0.0)
    torch.testing.assert_close(gradient.float(), wide[1], rtol=1e-2, atol=1e-3)


def test_the_backward_can_run_twice():
    leaf = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    loss = vocab_cross_entropy(leaf, torch.arange(6), MEAN, IGNORED, 0.0, "")
    first, again = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
