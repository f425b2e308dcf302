"""What autograd saved comes back from the host as it was: views, dtypes, lazy conjugates."""

from __future__ import annotations

import pytest
import torch

from planner.runtime.stage.host import Host
from planner.runtime.stage.host_activations import Incoming, Parcel


def through_the_host(parcel: Parcel) -> None:
    for move in (parcel.leave, parcel.let_go, parcel.fetch, parcel.arrive):
        move()


FORWARDS = {
    "two views of one storage": lambda a: (a[::2].exp() * a[1::2]).abs().sum(),
    "a conjugate first": lambda a: ((a.conj() * a) * a).abs().sum(),
    "a conjugate second": lambda a: ((a * a.conj()) * a).abs().sum(),
    "a part of a conjugate": lambda a: (a.conj().imag * a.real).sum(),
    "a part of a conjugate second": lambda a: (a.real * a.conj().imag).sum(),
}


@pytest.mark.parametrize("name", list(FORWARDS))
@pytest.mark.parametrize("is_moved", [False, True])
def test_gradients_after_the_host_are_autograds(name, is_moved):
    forward = FORWARDS[name]
    weight = torch.randn(6, dtype=torch.complex128, requires_grad=True)
    forward(weight * 2).backward()
    expected, weight.grad = weight.grad, None
    parcel = Parcel(Host(torch.device("cpu")), "0F0")
    with torch.autograd.graph.saved_tensors_hooks(parcel.pack, parcel.unpack):
        loss = forward(weight * 2)
    if is_moved:
        through_the_host(parcel)
    loss.backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=0)


def test_what_the_stage_holds_stays_and_the_rest_is_let_go_once_used():
    parcel = Parcel(Host(torch.device("cpu")), "0F0")
    param, activation = torch.randn(4), torch.randn(4)
    parcel.hold([param.view(2, 2), None])
    assert parcel.pack(param) is param
    first, second = parcel.pack(activation[:2]), parcel.pack(activation.view(2, 2))
    assert first.load is second.load  # one copy of a storage, however often it is saved
    parcel.leave()
    parcel.let_go()
    with pytest.raises(AssertionError, match="while on the host"):
        parcel.unpack(first)
    parcel.fetch()
    parcel.arrive()
    assert torch.equal(parcel.unpack(second), activation.view(2, 2))
    assert torch.equal(parcel.unpack(first), activation[:2])
    assert first.load.on_device is None


def test_the_gradient_of_an_input_is_left_without_holding_the_input():
    given = torch.randn(3)
    incoming = Incoming(given)
    (incoming.entering(given) * torch.arange(3.0)).sum().backward()
    assert torch.equal(incoming.grad, torch.arange(3.0))
    assert torch.equal(incoming.zeros(), torch.zeros(3))
