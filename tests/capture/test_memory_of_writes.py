"""N1: what in-place writes change is what shares the memory: views do, copies do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.capture import capture_module
from planner.errors import CaptureError
from tests.capture.masks.attending import check_equal, loss_of_graph

WIDTH, HALF = 16, 8


def copied_then_written(a: Tensor) -> Tensor:
    k = torch.empty_like(a)
    k.copy_(a)
    k.mul_(3)
    return k.tanh() + a


def source_of_a_copy_written(a: Tensor) -> Tensor:
    k = torch.empty_like(a)
    k.copy_(a)
    before = a * 1
    a.mul_(3)
    return k.tanh() + a + before


def assigned_then_written(a: Tensor) -> Tensor:
    b = torch.zeros_like(a)
    b[:] = a
    b += 1
    return b.tanh() + a


def copied_into_a_part_then_written(a: Tensor) -> Tensor:
    k = torch.zeros_like(a)
    part = k[..., :HALF]
    part.copy_(a[..., :HALF])
    part.mul_(2)
    return k + a


def parts_of_a_new_tensor(a: Tensor) -> Tensor:
    """As latent attention puts its keys together, where one part is all of it."""
    first = a[..., :HALF]
    k = a.new_empty((*a.shape[:-1], HALF))
    k[..., :HALF].copy_(first)
    k[..., 4:].copy_(a[..., :4])
    return torch.cat([k, first], -1) + a


def concatenated_alone(a: Tensor) -> Tensor:
    b = torch.cat([a, a.new_empty(0)])
    b.mul_(2)
    return a + b.tanh()


def moved_by_a_copy(a: Tensor) -> Tensor:
    b = a.to("cpu", copy=True)
    return a.tanh() + b.mul(2)


def dropout_of_nothing(a: Tensor) -> Tensor:
    """Which returns what it is given."""
    b = F.dropout(a, 0.0)
    b.mul_(2)
    return a + b.tanh()


def dropout_in_evaluation(a: Tensor) -> Tensor:
    b = F.dropout(a, 0.5, training=False)
    b.mul_(2)
    return a + b.tanh()


def a_part_written_twice(a: Tensor) -> Tensor:
    k = a.clone()
    part = k[..., :HALF]
    part.add_(1)
    part.mul_(2)
    return k.tanh()


def a_part_of_a_part_written_twice(a: Tensor) -> Tensor:
    k = a.clone()
    part = k[:, 0][..., :HALF]
    part.add_(1)
    part.mul_(2)
    return k.tanh()


def a_part_written_then_what_it_is_of(a: Tensor) -> Tensor:
    k = a.clone()
    row = k[:, 0]
    part = row[..., :HALF]
    part.add_(1)
    row.mul_(2)
    return k.tanh()


def written_read_and_written(a: Tensor) -> Tensor:
    k = a.clone()
    row = k[:, 0]
    row += 1
    read = row * 3
    row *= read
    return k.tanh() + read.unsqueeze(1)


def written_through_what_a_write_returns(a: Tensor) -> Tensor:
    k = a.clone()
    part = k[..., :HALF].add_(1)
    part.mul_(2)
    return k.tanh() + part.sum()


def rows_in_a_loop(a: Tensor) -> Tensor:
    k = torch.zeros_like(a)
    for row in range(3):
        part = k[:, row]
        part.copy_(a[:, row])
        part.mul_(row + 1.5)
    return k.tanh() + a


def a_part_of_what_an_op_returns_itself(a: Tensor) -> Tensor:
    """A cast to the dtype that it has returns what it is given: the part sees the write."""
    part = a[:, 0]
    b = a.type_as(a * 2)
    b.mul_(3)
    return b.tanh() + part[:, None]


def what_an_op_returns_itself_of_a_part(a: Tensor) -> Tensor:
    b = torch.atleast_3d(a)
    part = a[:, 0]
    part.mul_(3)
    return b.tanh() + a


WRITES: tuple[Callable[[Tensor], Tensor], ...] = (
    copied_then_written,
    source_of_a_copy_written,
    assigned_then_written,
    copied_into_a_part_then_written,
    parts_of_a_new_tensor,
    concatenated_alone,
    moved_by_a_copy,
    dropout_of_nothing,
    dropout_in_evaluation,
    a_part_written_twice,
    a_part_of_a_part_written_twice,
    a_part_written_then_what_it_is_of,
    written_read_and_written,
    written_through_what_a_write_returns,
    rows_in_a_loop,
    what_an_op_returns_itself_of_a_part,
)


class Model(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.inner, self.outer = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.outer(self.write(self.inner(x) * 1)).mean(1), y)


def batch(size: int) -> dict[str, Tensor]:
    x = torch.randn(size, 5, 4, dtype=torch.float64)
    return {"x": x, "y": torch.zeros(size, dtype=torch.long)}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_graph_computes_what_the_module_does(write):
    torch.manual_seed(0)
    module = Model(write).double()
    graph = capture_module(module, batch(2), batch(3), name="model")
    check_equal(module, graph, batch(5), rounding=1e-12)


def a_view_by_einsum_written(a: Tensor) -> Tensor:
    b = torch.einsum("bij->bji", a)
    b.mul_(2)
    return a + b.transpose(1, 2)


def what_an_einsum_views_written(a: Tensor) -> Tensor:
    b = torch.einsum("bij->bij", a)
    a.mul_(2)
    return a + b


def a_part_of_what_a_meshgrid_views_written(a: Tensor) -> Tensor:
    row = a[0, 0]
    rows, _ = torch.meshgrid(row, row.detach(), indexing="ij")
    a.mul_(2)
    return a + rows.mean()


HIDDEN = (
    a_view_by_einsum_written,
    what_an_einsum_views_written,
    a_part_of_what_a_meshgrid_views_written,
)


@pytest.mark.parametrize("write", HIDDEN, ids=lambda write: write.__name__)
def test_a_write_into_a_view_that_an_op_does_not_tell_of_is_refused(write):
    """N1: ATen says of neither op that it may return a view."""
    with pytest.raises(CaptureError, match=r"aten\.(einsum|meshgrid).* shares; write the out-of-"):
        capture_module(Model(write).double(), batch(2), batch(3), name="model")


def test_a_view_of_what_an_op_returns_itself_is_stale_after_a_write():
    write = a_part_of_what_an_op_returns_itself
    with pytest.raises(CaptureError, match="take the view again after the write"):
        capture_module(Model(write).double(), batch(2), batch(3), name="model")


def test_an_einsum_of_several_operands_may_be_written():
    def scores(a: Tensor) -> Tensor:
        found = torch.einsum("bij,bkj->bik", a, a)
        found.mul_(0.5)
        return found @ a

    module = Model(scores).double()
    graph = capture_module(module, batch(2), batch(3), name="model")
    check_equal(module, graph, batch(5), rounding=1e-12)


class Counting(nn.Module):
    """Writes twice through a row of a buffer, once with and once without gradients recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.inner(x)
        row = self.seen[0]
        with torch.no_grad():
            row.add_(a.detach().mean())
        row.mul_(2)
        return F.cross_entropy(self.outer(a * self.seen.sum()).mean(1), y)


def test_a_row_of_a_buffer_written_twice():
    torch.manual_seed(0)
    module = Counting().double()
    graph = capture_module(module, batch(2), batch(3), name="model")
    alone, given = copy.deepcopy(module), batch(5)
    for _ in range(2):
        torch.testing.assert_close(loss_of_graph(graph, module, given), alone(**given))
        torch.testing.assert_close(module.seen, alone.seen)
