"""Tables whose gradients are rows: what was looked up in a step, and what an optimizer is given.

A lookup's backward makes no gradient of the table's shape. It leaves the rows it has gradients of,
with their numbers, to the table (`RowTable.add`). At the end of a step replicas exchange theirs,
each adds all up in the same order, so that copies of a table stay equal to the last bit, and the
optimizer is given a sparse gradient of touched rows: rows that no sample of the step looked up do
not change.

    backward of a lookup     numbers [n], gradients [n, width]       once a microbatch and lookup
    end of the step          touched numbers [u], sums [u, width]    the same on all replicas
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import LayoutError, ModelError
from planner.graph import ModelGraph
from planner.graph.tables import sparse_tables
from planner.plan import Plan
from planner.runtime.start.groups.mesh import Mesh
from planner.runtime.state.optimizers.reach import takes
from planner.runtime.state.optimizers.several import Several
from planner.runtime.step.messages.wiring import stage_params

ROWS = "rows_of_table"
"""Attribute of a parameter that has its `RowTable`."""


def table_of(weight: Tensor) -> RowTable | None:
    """Return what keeps a parameter's rows; None for a parameter with a dense gradient."""
    found: RowTable | None = getattr(weight, ROWS, None)
    return found


def takes_rows(params: Iterable[Tensor]) -> bool:
    """Whether the gradient of any of these parameters is sparse."""
    return any(table_of(param) is not None for param in params)


class RowTable:
    """A table on this rank: the gradients of its rows in a step. Mutable.

    Attributes:
        fqn: its name in the user's module.
        stepped: what the optimizer steps on: copies where several stages of the rank have one.
    """

    def __init__(self, fqn: str, groups: Sequence[dist.ProcessGroup]) -> None:
        """`groups` are the ranks that have a copy: replicas, then other stages."""
        self.fqn = fqn
        self.stepped: list[nn.Parameter] = []
        self._groups = groups
        self._numbers: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._touched: Tensor | None = None
        self._sums: nn.Parameter | None = None

    def keep(self, weight: nn.Parameter, stepped: nn.Parameter) -> None:
        """Take a copy, as a stage has it and as the optimizer does."""
        for each in (weight, stepped):
            setattr(each, ROWS, self)
        self.stepped.append(stepped)

    def clear(self) -> None:
        """Forget the step before."""
        self._numbers.clear()
        self._rows.clear()
        self._touched = self._sums = None

    @torch.no_grad()
    def add(self, numbers: Tensor, rows: Tensor, padding_idx: int) -> None:
        """Keep gradients of rows, [n, width], whose `numbers` [n] are not that of the padding."""
        if padding_idx >= 0 and not isinstance(numbers, FakeTensor):
            counts = numbers != padding_idx
            numbers, rows = numbers[counts], rows[counts]
        self._numbers.append(numbers)
        self._rows.append(rows.to(self.stepped[0].dtype, copy=True))
        if sum(map(len, self._numbers)) > len(self.stepped[0]):
            # More rows than the table has: each once, they take no more memory than it.
            numbers, rows = self._take()
            self._numbers, self._rows = [numbers], [rows]

    def _take(self) -> tuple[Tensor, Tensor]:
        """Return what was kept, each number once, and let go of it."""
        like = self.stepped[0]
        numbers = torch.cat([like.new_empty(0, dtype=torch.int64), *self._numbers])
        rows = torch.cat([like.new_empty((0, like.shape[1])), *self._rows])
        self._numbers.clear()
        self._rows.clear()
        return by_row(numbers, rows, len(like))

    @torch.no_grad()
    def sum(self) -> None:
        """Add up the gradients of the step by row, over all ranks with a copy; all call it."""
        numbers, rows = self._take()
        for group in self._groups:
            numbers, rows = by_row(*_gathered(numbers, rows, group), len(self.stepped[0]))
        self._touched = numbers
        # (A parameter with a gradient, and no memory of its own.)
        self._sums = nn.Parameter(rows.new_empty(()).expand(rows.shape))
        self._sums.grad = rows

    @property
    def sums(self) -> nn.Parameter | None:
        """What has the step's gradients of rows as its `grad`; None before they are summed."""
        return self._sums

    def gradient(self) -> Tensor | None:
        """Return the step's gradient as the optimizer takes it: a sparse tensor."""
        if self._touched is None or self._sums is None or self._sums.grad is None:
            return None
        shape = tuple(self.stepped[0].shape)
        numbers = self._touched[None]
        return torch.sparse_coo_tensor(
            numbers, self._sums.grad, shape, is_coalesced=True, check_invariants=False
        )

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, what the optimizer steps on has the gradient."""
        gradient = self.gradient()
        for param in self.stepped:
            param.grad = gradient
        try:
            yield
        finally:
            for param in self.stepped:
                param.grad = None


def build_tables(
    graph: ModelGraph,
    plan: Plan,
    mesh: Mesh,
    *,
    weights: Mapping[int, Mapping[str, nn.Parameter]],
    stepped: Mapping[int, Mapping[str, nn.Parameter]],
) -> dict[str, RowTable]:
    """Return this rank's tables by the user's names; every rank calls it, as groups are made.

    `weights` and `stepped` give by stage and name what its programs take and what the optimizer
    steps on. Raises LayoutError for a table of stages with meshes of different shapes.
    """
    tables: dict[str, RowTable] = {}
    users = stage_params(graph, plan)
    replicas = mesh.group("data")
    for name in sparse_tables(graph):
        fqn = graph.tensor[name].fqn
        own = [index for index in weights if name in users[index]]
        holders = sorted({plan.stages[s].pp_rank for s, used in enumerate(users) if name in used})
        groups = [] if replicas is None else [replicas]
        if len(holders) > 1:
            meshes = [mesh.meshes[pp_rank] for pp_rank in holders]
            if len({each.shape for each in meshes}) > 1:
                raise LayoutError(
                    f"{fqn} has a sparse gradient, and stages with other degrees share it; give "
                    "them the same, or leave sparse=True out"
                )
            group = mesh.open_group(zip(*(each.ranks for each in meshes), strict=True))
            groups += [] if group is None else [group]
        if own:
            table = tables[fqn] = RowTable(fqn, groups)
            for index in own:
                table.keep(weights[index][fqn], stepped[index][fqn])
    return tables


def check_takes_rows(optimizer: torch.optim.Optimizer, tables: Iterable[RowTable]) -> None:
    """Raise ModelError where an optimizer can't step on the gradients it will be given: sparse ones
    of tables, dense ones of all else. A copy of it is tried on small tensors.
    """
    names = {id(param): table.fqn for table in tables for param in table.stepped}
    parts = optimizer.parts if isinstance(optimizer, Several) else (optimizer,)
    groups = [(each, at, g) for each in parts for at, g in enumerate(each.param_groups)]
    for part, at, group in groups:
        found = [names.get(id(param)) for param in group["params"]]
        named = next((name for name in found if name is not None), None)
        if named is not None and not takes(part, at, rows=True):
            raise ModelError(
                f"{type(part).__name__} takes no sparse gradients, such as that of {named}, which "
                "the model looks up with sparse=True; give its tables an optimizer of their own, "
                "such as optimizer=[SparseAdam(tables), AdamW(others)], or leave sparse=True out"
            )
        if None in found and not takes(part, at, rows=False):
            raise ModelError(
                f"{type(part).__name__} takes sparse gradients, and those of all but tables with "
                "sparse=True, looked up alone, are dense in a plan; use Adam for them"
            )


def by_row(numbers: Tensor, rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return each number once, in order, and the sums of its rows, always in the same order.

    Numbers are below `most`, the rows of their table.
    """
    if isinstance(numbers, FakeTensor):  # in a dry run, as if all numbers differed
        return numbers[:most].clone(), rows[:most].clone()
    unique, inverse = torch.unique(numbers, return_inverse=True)
    sums = rows.new_zeros((len(unique), *rows.shape[1:]))
    if rows.device.type == "cpu":
        # Row after row; threads of `index_put_` would add in any order.
        return unique, sums.index_add_(0, inverse, rows)
    # Sorts first, so that equal numbers are added in their order; `index_add_` would not.
    return unique, sums.index_put_((inverse,), rows, accumulate=True)


def _gathered(numbers: Tensor, rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the numbers and rows of all ranks of a group, in their order."""
    ranks = dist.get_world_size(group)
    count = torch.tensor([len(numbers)], device=numbers.device)
    counts = [torch.empty_like(count) for _ in range(ranks)]
    dist.all_gather(counts, count, group=group)
    if isinstance(numbers, FakeTensor):
        lengths = [len(numbers)] * ranks
    else:
        lengths = [int(each) for each in counts]
    most = max(lengths)
    padded_numbers = numbers.new_zeros(most)
    padded_numbers[: len(numbers)] = numbers
    padded_rows = rows.new_zeros((most, *rows.shape[1:]))
    padded_rows[: len(rows)] = rows
    all_numbers = [torch.empty_like(padded_numbers) for _ in range(ranks)]
    all_rows = [torch.empty_like(padded_rows) for _ in range(ranks)]
    dist.all_gather(all_numbers, padded_numbers, group=group)
    dist.all_gather(all_rows, padded_rows, group=group)
    pairs = list(zip(all_numbers, all_rows, lengths, strict=True))
    return (
        torch.cat([found[:length] for found, _, length in pairs]),
        torch.cat([found[:length] for _, found, length in pairs]),
    )
