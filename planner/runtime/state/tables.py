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
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import LayoutError, ModelError
from planner.language.graph import ModelGraph
from planner.language.graph.tables import tables_of
from planner.language.lowering.wiring import stage_params
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.calls.rows.table_lookup import ROWS
from planner.runtime.stage.host import Host
from planner.runtime.state.masters import rest_dtype
from planner.runtime.state.optimizers.reach import takes
from planner.runtime.state.optimizers.several import Several

PART_BYTES = 32 * 2**20
"""Of rows, exchanged at once."""


def table_of(weight: Tensor) -> RowTable | None:
    """Return what keeps a parameter's rows; None for a parameter with a dense gradient."""
    found: RowTable | None = getattr(weight, ROWS, None)
    return found


def has_sparse_gradient(param: Tensor) -> bool:
    """Whether the model has a parameter's gradient as a sparse tensor."""
    table = table_of(param)
    return table is not None and table.is_sparse


class RowTable:
    """A table on this rank: the gradients of its rows in a step. Mutable.

    Attributes:
        fqn: its name in the user's module.
        stepped: what the optimizer steps on: copies where several stages of the rank have one; on
            the host there is one.
    """

    def __init__(
        self,
        fqn: str,
        groups: Sequence[dist.ProcessGroup],
        *,
        is_sparse: bool,
        made: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        host: Host | None = None,
    ) -> None:
        """`groups` are the ranks that have a copy: replicas, then other stages. `host` has the
        table, in this `dtype`; lookups have the dtype `made`. With a gradient that is not sparse in
        the model the optimizer is given a dense one.
        """
        self.fqn, self.is_sparse, self._made, self._dtype = fqn, is_sparse, made, dtype
        self.stepped: list[nn.Parameter] = []
        self._weights: list[nn.Parameter] = []
        self._groups, self._device, self._host = groups, device, host
        self._numbers: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._touched: Tensor | None = None
        self._sums: nn.Parameter | None = None

    def keep(self, weight: nn.Parameter, stepped: nn.Parameter) -> None:
        """Take a copy, as a stage has it and as the optimizer does; on the host that is its own."""
        if self._host is not None:
            if not self.stepped:
                master = nn.Parameter(self._host.empty(weight.shape, self._dtype))
                setattr(master, ROWS, self)
                self.stepped.append(master)
            stepped = self.stepped[0]
        else:
            self.stepped.append(stepped)
        self._weights.append(weight)
        for each in (weight, stepped):
            setattr(each, ROWS, self)

    def clear(self) -> None:
        """Forget the step before."""
        self._numbers.clear()
        self._rows.clear()
        self._touched = self._sums = None

    @torch.no_grad()
    def lookup(self, weight: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers, where the table is, and their rows, on the device, in the dtype that
        programs take.
        """
        if self._host is None:
            return indices, F.embedding(indices, weight).to(self._made)
        with self._host.holding():
            numbers = torch.empty(indices.numel(), dtype=torch.int64).copy_(indices.reshape(-1))
            rows = self.stepped[0].detach().index_select(0, numbers)
            sent = self._host.empty(rows.shape, self._made, is_copied=True).copy_(rows)
        shape = (*indices.shape, weight.shape[1])
        made = torch.empty(shape, dtype=self._made, device=self._device)
        made.view(sent.shape).copy_(sent, non_blocking=True)
        return numbers, made

    @torch.no_grad()
    def add(self, numbers: Tensor, rows: Tensor, padding_idx: int) -> None:
        """Keep gradients of rows, [n, width], whose `numbers` [n], as they were looked up, are not
        that of the padding.
        """
        with self._holding():
            if self._host is not None:
                sent = self._host.empty(rows.shape, rows.dtype, is_copied=True)
                self._host.down([(rows, sent)], f"rows of {self.fqn}").wait()
                rows = sent
            if padding_idx >= 0 and not isinstance(numbers, FakeTensor):
                counts = numbers != padding_idx
                numbers, rows = numbers[counts], rows[counts]
            self._numbers.append(numbers)
            # In the dtype of the sums: fp32 under bf16.
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
        assert all(weight.grad is None for weight in self._weights), (
            "a gradient passed the table by"
        )
        with self._holding():
            numbers, rows = self._take()
            # Replicas first, then stages: each number is sent once more only after its rows were
            # added up.
            for group in self._groups:
                numbers, rows = _gathered(numbers, rows, group, self._device)
                numbers, rows = by_row(numbers, rows, len(self.stepped[0]))
            self._touched = numbers
            # (A parameter with a gradient, and no memory of its own.)
            self._sums = nn.Parameter(rows.new_empty(()).expand(rows.shape))
            self._sums.grad = rows

    def _holding(self) -> AbstractContextManager[None]:
        return nullcontext() if self._host is None else self._host.holding()

    @property
    def is_on_host(self) -> bool:
        """Whether the host has the table."""
        return self._host is not None

    @property
    def sums(self) -> nn.Parameter | None:
        """What has the step's gradients of rows as its `grad`; None before they are summed."""
        return self._sums

    def gradient(self) -> Tensor | None:
        """Return the step's gradient as the optimizer takes it."""
        if self._touched is None or self._sums is None or self._sums.grad is None:
            return None
        shape, rows = tuple(self.stepped[0].shape), self._sums.grad
        if not self.is_sparse:
            return rows.new_zeros(shape).index_copy_(0, self._touched, rows)
        return torch.sparse_coo_tensor(
            self._touched[None], rows, shape, is_coalesced=True, check_invariants=False
        )

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, what the optimizer steps on has the gradient."""
        with self._holding():
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
    host: Host,
) -> dict[str, RowTable]:
    """Return this rank's tables by the user's names; every rank calls it, as groups are made.

    `weights` and `stepped` give by stage and name what its programs take and what the optimizer
    steps on; `host` has those that the plan keeps there. Raises LayoutError for a table of stages
    with meshes of different shapes.
    """
    found: dict[str, RowTable] = {}
    users = stage_params(graph, plan)
    replicas = mesh.group("data")
    for each in tables_of(graph):
        name, fqn = each.name, each.fqn
        if not graph.tensor[name].table:
            continue
        own = [index for index in weights if name in users[index]]
        holders = sorted({plan.stages[s].pp_rank for s, used in enumerate(users) if name in used})
        groups = [] if replicas is None else [replicas]
        if len(holders) > 1:
            meshes = [mesh.meshes[pp_rank] for pp_rank in holders]
            if len({each.shape for each in meshes}) > 1:
                raise LayoutError(
                    f"{fqn} has a gradient of rows, and stages with other degrees share it; give "
                    "them the same, or leave sparse=True out"
                )
            group = mesh.open_group(zip(*(each.ranks for each in meshes), strict=True))
            groups += [] if group is None else [group]
        if own:
            table = found[fqn] = RowTable(
                fqn,
                groups,
                is_sparse=each.is_sparse,
                made=getattr(torch, graph.tensor[name].dtype),
                dtype=rest_dtype(graph.tensor[name], plan.precision),
                device=mesh.device,
                host=host if graph.tensor[name].on_host else None,
            )
            for index in own:
                # Several stages of a rank share the table's rows: their copies step on one
                # gradient.
                table.keep(weights[index][fqn], stepped[index][fqn])
    return found


def check_takes_rows(optimizer: torch.optim.Optimizer, tables: Iterable[RowTable]) -> None:
    """Raise ModelError where an optimizer can't step on the gradients it will be given: sparse ones
    of tables, dense ones of all else. A copy is tried on small tensors, if there is a doubt.
    """
    sparse = [table for table in tables if table.is_sparse]
    names = {id(param): table.fqn for table in sparse for param in table.stepped}
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
        lazy = isinstance(part, torch.optim.SparseAdam)
        if None in found and lazy and not takes(part, at, rows=False):
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


def _gathered(
    numbers: Tensor, rows: Tensor, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the numbers and rows of all ranks of a group, in their order, where they were.

    They are exchanged on the device, as groups are the devices', a part of them at a time.
    """
    ranks = dist.get_world_size(group)
    # Ranks touched different numbers of rows, and a gather takes equal lengths: parts are filled up
    # to the longest and cut again on arrival.
    count = torch.tensor([len(numbers)], device=device)
    counts = [torch.empty_like(count) for _ in range(ranks)]
    dist.all_gather(counts, count, group=group)
    is_fake = isinstance(numbers, FakeTensor)
    lengths = [len(numbers) if is_fake else int(each) for each in counts]
    step = max(1, PART_BYTES // max(1, rows[:1].nbytes))
    parts = range(0, max(lengths), step)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(ranks)]
    # In parts of 32 MiB: of a table on the host the device never holds all rows at once.
    for start in parts:
        size = min(step, max(lengths) - start)
        theirs = [
            _all_gather(tensor[start : start + size], size, group, device)
            for tensor in (numbers, rows)
        ]
        for rank, length in enumerate(lengths):
            here = max(0, min(size, length - start))
            own = (each[rank][:here].to(numbers.device) for each in theirs)
            found[rank].append(tuple(own))  # type: ignore[arg-type]
    # Rank by rank on every rank, so all add the same rows in the same order.
    ordered = [part for own in found for part in own]
    if not ordered:
        return numbers, rows
    return torch.cat([each for each, _ in ordered]), torch.cat([each for _, each in ordered])


def _all_gather(
    tensor: Tensor, size: int, group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """Return the ranks' tensors, each filled up to `size` entries."""
    own = torch.zeros((size, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
    own[: len(tensor)] = tensor
    made = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(made, own, group=group)
    return made
