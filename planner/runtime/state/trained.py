"""What this rank trains, from a cleared gradient to the optimizer's step.

The parameters are those of the rank's stages, or their copies where the plan makes some: in
fp32 for precision "bf16" or "fp16", on the host for an optimizer there. Their gradients are summed
over the ranks with the same parameters and over tied copies, and clipped by the norm over the
whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.errors import ModelError
from planner.language.graph import ModelGraph
from planner.language.layout.axes import split_axes
from planner.language.layout.placements import Placements
from planner.language.layout.sharing import sharing
from planner.language.lowering.holdings import Holdings
from planner.language.lowering.wiring import stage_params
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.host import Host
from planner.runtime.stage.stage import StageModule
from planner.runtime.state import zero
from planner.runtime.state.gradients.clip import Clipping
from planner.runtime.state.gradients.reached import without_gradients
from planner.runtime.state.gradients.reduce import GradBuckets
from planner.runtime.state.gradients.tied import tied_copies
from planner.runtime.state.masters import MasterParams
from planner.runtime.state.optimizers.host_optimizer import HostMasters, HostUpdates
from planner.runtime.state.optimizers.optimizer import (
    build_optimizer,
    read_beyond_elements,
    use_fused_kernels,
)
from planner.runtime.state.optimizers.owned import Owned
from planner.runtime.state.optimizers.passing_over import can_pass_over, passing_over
from planner.runtime.state.optimizers.shards import stepping_shards
from planner.runtime.state.optimizers.whole_params import WholeParams, stepped_on
from planner.runtime.state.tables import build_tables, check_takes_rows

Owner = StageModule | MasterParams | HostMasters


class TrainedParams:
    """A rank's trained parameters by stage. Mutable: gradients, and sums under way.

    `owners` has, for each of the rank's stages, the object that names what is trained of it.
    `sharded` says that FSDP2 holds them, and sums their gradients itself.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        mesh: Mesh,
        stages: Mapping[int, StageModule],
        owners: Mapping[int, Owner],
        placements: Mapping[str, Placements],
        *,
        sharded: bool,
        host: Host,
    ) -> None:
        """Every rank builds one at the same time: groups are made. `host` has what the plan puts
        there.
        """
        self._graph, self._plan, self._mesh = graph, plan, mesh
        self._owners, self._placements, self._sharded = owners, placements, sharded
        self._stages = tuple(stages.values())
        self._buckets: dict[int, list[GradBuckets]] = {}
        self._unbucketed: list[nn.Parameter] = []
        self._tables = build_tables(
            graph,
            plan,
            mesh,
            weights={index: stage.named_params() for index, stage in stages.items()},
            stepped={index: _stepped(owner) for index, owner in owners.items()},
            host=host,
        )
        names = {meta.fqn: meta.name for meta in graph.params}
        # FSDP2 reduces what it shards; tables exchange rows. Buckets sum what is left, over
        # replicas.
        for index, owner in owners.items():
            named = owner.named_params()
            by_ranks: dict[str, list[nn.Parameter]] = defaultdict(list)
            for fqn, param in named.items():
                if fqn not in self._tables:
                    by_ranks[placements[names[fqn]].replicas].append(param)
            self._buckets[index] = []
            for ranks, params in by_ranks.items():
                group = mesh.group(ranks)
                summed = [p for p in params if not self._is_shard(p)] if group is not None else []
                if group is not None and summed:
                    self._buckets[index].append(GradBuckets(summed, group))
                # Alone or sharded: autograd or FSDP2 makes the gradient anew each step.
                self._unbucketed += params if group is None else filter(self._is_shard, params)
        self._tied = tied_copies(graph, plan, mesh, owners, without=self._tables)
        self._host = host if plan.optimizer_on_host else None
        self._updates: HostUpdates | None = None
        self._whole: WholeParams | None = None
        self._owned: Owned | None = None
        self._clipping: Clipping | None = None
        self._of_tables: dict[str, float] = {}
        # (Put together once: for a large model it takes as long as a clip. Before the first step
        # FSDP2 has the shards registered, which are what has gradients.)
        self._dense = tuple(
            param
            for owner in owners.values()
            for fqn, param in owner.named_params().items()
            if fqn not in self._tables
        )

    def _is_shard(self, param: nn.Parameter) -> bool:
        """Whether FSDP2 holds it: not what can't be cut (`planner.runtime.state.zero`)."""
        return self._sharded and isinstance(param, DTensor)

    def by_name(self) -> dict[str, list[nn.Parameter]]:
        """Return what has the gradients, by the user's names; several where stages share one."""
        return _by_name(owner.named_params() for owner in self._owners.values())

    def with_gradients(self) -> Iterator[nn.Parameter]:
        """Yield all that has a gradient of its own; of a table what stands for its rows'."""
        yield from self._dense
        yield from (table.sums for table in self._tables.values() if table.sums is not None)

    def stepped_by_name(self) -> dict[str, list[nn.Parameter]]:
        """Return what the optimizer steps on, by the user's names."""
        on_host = {f: list(t.stepped) for f, t in self._tables.items() if t.is_on_host}
        return _by_name(map(_stepped, self._owners.values())) | on_host

    def build_optimizer(
        self,
        given: Any,
        module: nn.Module,
        *,
        is_accumulating: Callable[[], bool] = lambda: False,
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer that `step` uses (`planner.runtime.state.optimizers.optimizer`), and
        nothing else does from now on (`planner.runtime.state.optimizers.owned`).
        """
        optimizer = build_optimizer(given, module, self.stepped_by_name())
        if optimizer is not None:
            check_takes_rows(optimizer, self._tables.values())
        # (AdamW, the default, works by element: nothing to measure.)
        if optimizer is not None and given is not None and self._plan.world_size > 1:
            self._make_whole(optimizer)
        masters = [o for o in self._owners.values() if isinstance(o, HostMasters)]
        if masters and optimizer is not None and self._host is not None:
            trained = [master for owner in masters for master in owner.trained.values()]
            self._updates = HostUpdates(trained, optimizer, self._host)
        if optimizer is not None:
            use_fused_kernels(optimizer, self._mesh.device)
            self._owned = Owned(optimizer, is_accumulating)
        return optimizer

    def _make_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer whole parameters where pieces would be another training."""
        # Pieces arise from ZeRO's shards, tp or ep; stages (pp) only spread whole parameters.
        axes = (*(axis.name for axis in split_axes()), "ep")
        is_cut = self._sharded or any(self._mesh.size(axis) > 1 for axis in axes)
        wanted = {
            id(param)
            for param in read_beyond_elements(optimizer, is_cut=is_cut, is_spread=self._plan.pp > 1)
        }
        if not wanted:
            return
        held = {
            h.meta.fqn: h for h in Holdings(self._graph, self._plan).of(dist.get_rank()).values()
        }
        whole = WholeParams(
            (
                (fqn, param, held[fqn], self._placements[held[fqn].meta.name])
                for fqn, copies in self.stepped_by_name().items()
                for param in copies
                if id(param) in wanted
            ),
            self._mesh,
            sharded=self._sharded,
        )
        if whole.params and self._host is not None:
            raise ModelError(
                f"{type(optimizer).__name__} reads whole parameters, which the plan cuts and keeps "
                "on the host; search without `offload`, or with an optimizer that works by element"
            )
        cut = next((p.fqn for p in whole.params if p.fqn in self._tables), None)
        if cut is not None:
            raise ModelError(
                f"{type(optimizer).__name__} reads whole parameters, and the plan cuts {cut}, of "
                "which rows have gradients; search with `tp` 1, or with an optimizer that works by "
                "element"
            )
        self._whole = whole if whole.params else None
        whole.take_over(optimizer)

    def optimized_by_name(self) -> dict[str, list[nn.Parameter]]:
        """Return what is in the optimizer here, by the user's names: wholes that the rank owns."""
        return stepped_on(self.stepped_by_name(), self._whole)

    def zero_gradients(self) -> None:
        """Forget the gradients of the step before."""
        # Buckets are zeroed, as their views stay; other gradients are freed until the next
        # backward.
        for buckets in self._all_buckets():
            buckets.zero()
        for param in self._unbucketed:
            param.grad = None
        for table in self._tables.values():
            table.clear()
        # FSDP2 keeps sums that it has not reduced (ZeRO 1) beside the shards' `grad`.
        for stage in self._stages if self._sharded else ():
            zero.forget_gradients(stage)

    def start_sums(self, stage_index: int) -> None:
        """Begin summing a stage's gradients over the replicas; they must be complete."""
        for buckets in self._buckets[stage_index]:
            buckets.start()

    def _all_buckets(self) -> Iterator[GradBuckets]:
        return chain.from_iterable(self._buckets.values())

    def finish_sums(self) -> None:
        """Wait for those sums, and add up those of tied copies."""
        # Replicas first: a tied copy then sums finished gradients across stages, each once.
        for buckets in self._all_buckets():
            buckets.finish()
        for tied in self._tied:
            tied.sum()
        for table in self._tables.values():
            table.sum()

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients to a joint norm of at most `max_norm`; return the norm before."""
        if self._clipping is None:
            shares, self._of_tables = self._shares()
            self._clipping = Clipping(shares, self._mesh)
        rows = ((self._tables[fqn].sums, share) for fqn, share in self._of_tables.items())
        return self._clipping.clip(
            max_norm, [(sums, share) for sums, share in rows if sums is not None]
        )

    def gradients(self) -> Iterator[Tensor]:
        """Yield this rank's pieces of the gradients."""
        for param in self.with_gradients():
            if param.grad is not None:
                yield param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad

    def _shares(self) -> tuple[list[tuple[nn.Parameter, float]], dict[str, float]]:
        """Return parameters with the share of each that counts for the gradient's norm, and the
        shares of tables by name.
        """
        found = []
        metas = {meta.fqn: meta for meta in self._graph.params}
        of_tables: dict[str, float] = defaultdict(float)
        users = stage_params(self._graph, self._plan)
        for index, owner in self._owners.items():
            for fqn, param in owner.named_params().items():
                name = metas[fqn].name
                # A tied parameter counts on the first stage that uses it, after its copies were
                # summed.
                is_first_copy = not any(name in names for names in users[:index])
                # Each of the ranks with this very piece has the same gradient.
                shared = sharing(self._placements[name], is_sharded=self._is_shard(param))
                copies = self._mesh.own.size(*shared.alike)
                if fqn in self._tables:
                    of_tables[fqn] += is_first_copy / copies
                    continue
                found.append((param, is_first_copy / copies))
        return found, of_tables

    def write_back(self) -> None:
        """Bring the parameters of the stages to the values of what the optimizer steps on."""
        for owner in self._owners.values():
            if not isinstance(owner, StageModule):
                owner.write_back()
        if self._whole is not None:
            self._whole.refresh()

    def step(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        unreached: Collection[str] = (),
        is_wrong: Tensor | None = None,
    ) -> None:
        """Let the optimizer step, and bring the parameters of the stages to what was trained.

        The `unreached`, by the user's names and the same on all ranks, have no gradient; those that
        are made whole are passed over by all ranks that share them. Where the flag `is_wrong` is 1
        nothing changes; only for an optimizer that it `can_pass_over`.
        """
        named = self.by_name() if unreached else {}
        owned = nullcontext() if self._owned is None else self._owned.stepping()
        over = nullcontext() if is_wrong is None else passing_over(optimizer, is_wrong)
        with owned, over, without_gradients(p for fqn in unreached for p in named.get(fqn, ())):
            self._step(optimizer)

    def can_pass_over(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether a step leaves all as it was where a flag on the device is 1.

        Not one of the host's, which reads no flag there; nor of wholes and rows, which are made and
        handed out beside it.
        """
        beside = self._host or self._updates or self._whole or self._tables
        return not beside and can_pass_over(optimizer)

    @contextmanager
    def _gradients_of_tables(self) -> Iterator[None]:
        """Inside, tables have the gradients of their rows."""
        with ExitStack() as given:
            for table in self._tables.values():
                given.enter_context(table.given())
            yield

    def _step(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._whole is not None:
            self._whole.gather_gradients()
        if self._updates is not None:
            self._updates.step(beside=self._gradients_of_tables())
        elif optimizer is not None and self._host is not None:
            with self._host.working("update"), self._gradients_of_tables():
                optimizer.step()
        elif optimizer is not None:
            with stepping_shards(optimizer), self._gradients_of_tables():
                optimizer.step()
        if self._whole is not None:
            self._whole.hand_out()
        for owner in self._owners.values():
            if isinstance(owner, MasterParams):
                owner.write_back()


def _stepped(owner: Owner) -> dict[str, nn.Parameter]:
    return owner.masters() if isinstance(owner, HostMasters) else owner.named_params()


def _by_name(stages: Iterable[Mapping[str, nn.Parameter]]) -> dict[str, list[nn.Parameter]]:
    held: dict[str, list[nn.Parameter]] = {}
    for named in stages:
        for fqn, param in named.items():
            held.setdefault(fqn, []).append(param)
    return held
