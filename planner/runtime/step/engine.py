"""Engine: a model trained as its plan says, from the outside like one device.

Every rank builds the engine with the same model and calls `step` with the same global batch, of
which the engine takes its part, or with that part alone. One device is the plan with all sizes
one and takes the same path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import PlanError
from planner.language.across import follows_from_parts
from planner.language.across.cut.batch_statistics import deferred
from planner.language.across.cut.whole_batch import graph_under
from planner.language.graph import ModelGraph
from planner.language.graph.tables import with_table_lookups
from planner.language.lowering.wiring import (
    build_edges,
    shaped_edges,
    stage_params,
)
from planner.language.plan import Plan
from planner.language.plan.accepted import LOCAL_SAMPLES
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import Job
from planner.runtime.batches.inputs.dealing import Dealt
from planner.runtime.batches.inputs.documents import Documents
from planner.runtime.batches.inputs.feed import Feed
from planner.runtime.batches.inputs.feeder import Feeder, Shaped
from planner.runtime.batches.inputs.loss_weights import LossWeight, LossWeights
from planner.runtime.checkpoint.beside import Beside
from planner.runtime.checkpoint.folder import is_checkpoint
from planner.runtime.initial.places import take_first_values
from planner.runtime.initial.values import FirstValues, ModuleValues
from planner.runtime.process import collectives
from planner.runtime.process import device as devices
from planner.runtime.process.ended import counted_step
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.process.recorder import start_recorder
from planner.runtime.process.spans import Spans
from planner.runtime.process.watchdog import start_watchdog
from planner.runtime.stage.compiled.graphs import Capture
from planner.runtime.stage.compiled.kernels import Compiler, compiled
from planner.runtime.stage.compiled.sizes import OWN_SIZES
from planner.runtime.stage.host import Host
from planner.runtime.stage.host_activations import ActivationsOnHost
from planner.runtime.stage.programs import Programs
from planner.runtime.stage.stage import StageModule
from planner.runtime.state import zero
from planner.runtime.state.average import WeightAverage
from planner.runtime.state.gradients.loss_scale import LossScaler
from planner.runtime.state.gradients.reached import Reached
from planner.runtime.state.optimizers.optimizer import (
    OWN_SCALER,
    OWN_SCHEDULER,
    check_schedulers,
)
from planner.runtime.state.tables import table_of
from planner.runtime.state.users_module.outside import OutsideTensors
from planner.runtime.state.users_module.untouched import Untouched
from planner.runtime.state.zero_spans import record_exchange
from planner.runtime.step.batch_norm import DeferredStatistics
from planner.runtime.step.build import (
    BlockPrograms,
    build_rank_state,
    check_tables,
    zero_stage_of,
)
from planner.runtime.step.compiling import CompiledSizes, capture_of
from planner.runtime.step.device_marks import DeviceMarks
from planner.runtime.step.evaluation import Evaluation
from planner.runtime.step.executor import Executor, Hooks
from planner.runtime.step.intermediates import Seen, gathered, watching
from planner.runtime.step.messages.p2p import Post
from planner.runtime.step.update.accumulation import Accumulation
from planner.runtime.step.update.updates import Updates
from planner.timeline import DEAL

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from planner.runtime.batches.loader import Loader
    from planner.runtime.batches.order import AtEnd
    from planner.runtime.checkpoint.checkpoints import Checkpoints
    from planner.runtime.checkpoint.kept import Kept
    from planner.runtime.checkpoint.training import Loaded


@dataclass(slots=True)
class _Added:
    """The last batch that was added for an update apart. Mutable: whether its gradients are whole.

    Attributes:
        feed, loss: of that batch.
        is_finished: whether gradients are summed over ranks.
    """

    feed: Feed
    loss: Tensor
    is_finished: bool = False


class Engine:
    """A rank's part of a model in training. Mutable: weights and optimizer state.

    Attributes:
        state: what this rank holds.
        fetched: what the last step was told to fetch.
        dealt: how samples of the last batch were dealt to replicas and microbatches by their work;
            None where they are no packed documents, or stay in the order they were given.
        average: the average of weights, once `average_weights` began it.
        after_step: functions that are given each step's loss.
        after_load: functions that run when a training was loaded.
    """

    def __init__(
        self,
        plan: Plan,
        graph: ModelGraph,
        model: nn.Module,
        mesh: Mesh,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        deferred_batch_norm: bool = False,
        loss_weight: LossWeight | None = None,
        host: Host | None = None,
        compiler: Compiler | None = None,
        capture: Capture | None = None,
        may_be_empty: bool = False,
        values: FirstValues | None = None,
        check_values: bool = False,
        buckets: tuple[ModelGraph, ...] = (),
        pad: Mapping[str, float] | None = None,
        capture_evaluation: Callable[[], tuple[ModelGraph, ...]] | None = None,
        accept: Iterable[str] = (),
        balance_documents: bool = True,
    ) -> None:
        """`graph` is the capture of `model`; `values` brings first values (None: those of the
        model, which rank 0 gives to all ranks). `host` takes what the plan puts there (None: this
        machine's memory), `compiler` makes kernels of compiled blocks (None: this machine's),
        `capture` graphs of these (None: CUDA's, where the plan has them).
        A model that `may_be_empty` has tensors on the meta device, whose values
        are loaded afterwards. `buckets` are its captures
        on the other shapes of the plan, and `pad` fills batches up to them. `capture_evaluation`
        gives all of them in evaluation mode, on every rank; None: they are the same. `accept` names
        what is accepted beside what the plan accepts. With `balance_documents` samples of packed
        documents are dealt to parts of a batch by attention's work on them, where that changes
        nothing.
        """
        # The merge counts values per channel by the shapes of a single capture.
        if buckets and deferred_batch_norm:
            raise PlanError(
                "deferred_batch_norm merges statistics of one shape, and the plan's batches may "
                "have several; leave it out, or search without `lengths`"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise PlanError(f"max_grad_norm={max_grad_norm} must be positive, or None not to clip")
        self._schedulers = check_schedulers(scheduler, optimizer)
        if plan.stages[-1].last_block != len(graph.blocks) - 1:
            raise PlanError(
                f"the plan's stages end with block {plan.stages[-1].last_block} and the model's "
                f"last block is {len(graph.blocks) - 1}; search again"
            )
        looked_up = [with_table_lookups(each, plan.tables_on_host) for each in (graph, *buckets)]
        check_tables(looked_up[0], plan)
        captured = (graph, *looked_up[1:])
        if deferred_batch_norm:
            looked_up[0] = deferred(looked_up[0])
        graph, graphs = looked_up[0], tuple(looked_up)
        self.after_step: list[Callable[[Tensor], None]] = []
        self.after_load: list[Callable[[], None]] = []
        self.average: WeightAverage | None = None
        self._host = host or Host(mesh.device)
        self.schedule = schedule_of(plan)
        zero_stage = zero_stage_of(plan, self.schedule, mesh)
        self._lowered = BlockPrograms(plan, mesh, zero_stage=zero_stage)
        self._away = self._activations_on_host(plan, mesh)
        # Edges are numbered alike on all ranks, as they follow from graph and plan: messages need
        # no header.
        edges = build_edges(graph, plan)
        self._programs = self._lowered.of(graphs)
        self._compiled: CompiledSizes | None = None
        if plan.is_compiled:
            own = self.schedule.stages_of(mesh.rank("pp"))
            capture = capture_of(plan, mesh) if capture is None else capture
            self._compiled = CompiledSizes(
                self._programs, graph, plan, mesh, own, compiler or compiled, capture
            )
        held = build_rank_state(
            plan,
            graphs,
            captured,
            model,
            mesh,
            schedule=self.schedule,
            edges=edges,
            programs=self._programs,
            lowered=self._lowered,
            zero_stage=zero_stage,
            host=self._host,
            away=self._away,
            pad=pad or {},
            may_be_empty=may_be_empty,
            makes_buffers=values is not None,
        )
        self.state = state = held.state
        take_first_values(state, values or ModuleValues(model, mesh))
        # First values are given to what the optimizer steps on (fp32 masters, copies on the host);
        # the stages' own parameters are these, rounded or copied.
        state.trained.write_back()
        self._accumulation = Accumulation()
        self._added: _Added | None = None
        self._is_apart = False
        state.optimizer = state.trained.build_optimizer(
            optimizer, model, is_accumulating=lambda: self.is_accumulating
        )
        self.fetched: dict[str, Tensor] = {}
        self.dealt: Dealt | None = None
        self._has_told_dealt = False
        self._runs_of_fetched: dict[tuple[int, str], int] = {}
        self._statistics = (
            DeferredStatistics(captured[0], plan, mesh, state.stages)
            if deferred_batch_norm
            else None
        )
        recorder = self._host.recorder = start_recorder(mesh)
        self._record_collective = None if recorder is None else recorder.in_job
        if recorder is not None and not recorder.on_gpu:
            for stage in state.stages.values():
                record_exchange(stage, recorder.in_job)
        self._spans = Spans(recorder)
        self._executor = Executor(
            schedule=self.schedule,
            pp_rank=mesh.rank("pp"),
            stages=state.stages,
            edges=edges,
            post=Post(
                mesh,
                self.schedule,
                edges,
                plan,
                buckets=[shaped_edges(edges, bucket) for bucket in graphs[1:]],
            ),
            weight_queue=self._lowered.weight_queue,
            beside=self._lowered.beside,
            lookahead=plan.receive_ahead,
            marks=DeviceMarks(mesh.device) if devices.is_accelerator(mesh.device) else None,
            spans=self._spans,
            away=self._away,
            hooks=Hooks(
                after_forward=self._after_forward,
                before_backward=self._before_backward,
                after_gradients=self._after_gradients,
            ),
        )
        self._updates = Updates(
            state,
            self._executor,
            self._accumulation,
            self._spans,
            reached=Reached(
                state.stages,
                mesh,
                [[graph.tensor[n].fqn for n in names] for names in stage_params(graph, plan)],
                {graph.tensor[name].fqn: lies for name, lies in state.placements.items()},
            ),
            statistics=self._statistics,
            scaler=LossScaler() if plan.precision == "fp16" else None,
            schedulers=self._schedulers,
            max_grad_norm=max_grad_norm,
            check_values=check_values,
            hold=self._hold,
        )
        self._checkpoints: Checkpoints | None = None
        self._kept: Kept | None = None
        start_watchdog(self._executor.status, step_s=plan.estimate.get("step_s", 0.0))
        self._untouched: Untouched | None = None
        self._evaluation = Evaluation(
            state,
            self._programs,
            self._lowered.of,
            capture_evaluation,
            has_deferred_statistics=self._statistics is not None,
        )
        self._loss_dtype = getattr(torch, graph.tensor[graph.loss].dtype)
        self._feeder = Feeder(
            [Shaped(each, made) for each, made in zip(graphs, held.preambles, strict=True)],
            plan,
            mesh,
            pad=pad or {},
            # (Parts that count or compute in a way of their own are those of the user's order.)
            documents=Documents(captured, plan, pad=pad or {})
            if balance_documents and LOCAL_SAMPLES not in {*plan.accept, *accept}
            else None,
            side_inputs={s: stage.wiring.side_inputs for s, stage in state.stages.items()},
            loss_weights=LossWeights(
                mesh,
                dtype=self._loss_dtype,
                has_loss=any(stage.wiring.has_loss for stage in state.stages.values()),
                takes=any(
                    held.wholes[0].names.intersection(stage.wiring.side_inputs)
                    for stage in state.stages.values()
                ),
                count=loss_weight,
                wholes=held.wholes,
                is_exact=follows_from_parts(graph_under(captured[0], plan))
                and not (callable(loss_weight) and LOCAL_SAMPLES in {*plan.accept, *accept}),
            ),
        )

    def _activations_on_host(self, plan: Plan, mesh: Mesh) -> ActivationsOnHost | None:
        own = self.schedule.stages_of(mesh.rank("pp"))
        away = [index for index in own if plan.stages[index].activations_on_host]
        jobs = self.schedule.jobs[mesh.rank("pp")]
        return ActivationsOnHost(self._host, jobs, away) if away else None

    # -- what it holds, for scripts ------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan by which it trains."""
        return self.state.plan

    @property
    def graph(self) -> ModelGraph:
        """The graph that stages run."""
        return self.state.graph

    @property
    def mesh(self) -> Mesh:
        """Where this rank is, and its process groups."""
        return self.state.mesh

    @property
    def stages(self) -> dict[int, StageModule]:
        """The stage modules of this rank, by stage index."""
        return self.state.stages

    @property
    def outside(self) -> OutsideTensors:
        """The tensors of the state dict that lie in no stage."""
        return self.state.outside

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Over this rank's parameters; None when it holds none that train."""
        return self.state.optimizer

    @property
    def grad_norm(self) -> Tensor | None:
        """Of the last update's gradients before clipping; None where they were not clipped."""
        return self._updates.grad_norm

    @property
    def scaler(self) -> LossScaler | None:
        """What scales the loss; None but for precision "fp16"."""
        return self._updates.scaler

    @property
    def is_skipped(self) -> bool:
        """Whether the last update was passed over, as gradients of the scaled loss were not
        finite.
        """
        return self._updates.is_skipped

    @property
    def steps(self) -> int:
        """How many updates were made."""
        return self.state.steps

    @property
    def samples(self) -> int:
        """Of how many samples the updates were."""
        return self.state.samples

    # -- running ------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Into how many parts this rank's stages cut the batch."""
        return self.mesh.size("batch")

    @property
    def replica(self) -> int:
        """Which of them is this rank's own."""
        return self.mesh.rank("batch")

    @property
    def reads(self) -> frozenset[str]:
        """Paths of the batch's tensors that this rank needs; an `OwnPart` may lack the others."""
        return self._feeder.reads

    def loader(
        self,
        data: Any,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        at_end: AtEnd | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
    ) -> Loader:
        """Return what deals a dataset to the ranks, for each step the own part of this replica.

        `data` is a map-style dataset, an iterable of samples that begins anew at each `iter`, a
        stream of shards (`datasets`), or a DataLoader, whose dataset, order, collate_fn and workers
        are taken; all ranks give the same. `at_end` says what becomes of the last samples of a
        pass, fewer than a batch: "wrap" fills up from the front, "drop" leaves them out, "short"
        trains on a smaller batch (None: "wrap", or as the DataLoader drops). `shuffle` draws an
        order for each pass from `seed`. The rest is as a DataLoader takes it; memory is pinned
        where there is a GPU. Raises ModelError for data that can't be dealt like this.
        """
        from planner.runtime.batches.loader import Loader

        return Loader(
            self.plan,
            self.mesh,
            self._feeder,
            data,
            shuffle=shuffle,
            seed=seed,
            at_end=at_end,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
        )

    def watch(self, module: nn.Module, loss: Any = None) -> None:
        """Refuse steps from now on when the user's module, or the loss, is no longer what it is."""
        self._untouched = Untouched(module, loss)

    @property
    def job(self) -> Job | None:
        """The job that this rank runs now; None between steps."""
        return self._executor.job

    def step(self, batch: Any, *, update: bool = True, fetch: Iterable[str] = ()) -> Tensor:
        """Train on one global batch; return its mean loss, equal on every rank.

        Every rank gives the whole batch, or every rank the `planner.OwnPart` of its replica. It may
        be of fewer samples than ``plan.global_batch``, down to one for each microbatch and
        replica (whole units, where samples belong together: ``plan.unit``); each counts the same,
        however unevenly they are cut. Raises ModelError for a batch that the plan can't take,
        PlanError when the module that the plan was applied to was changed since (a parameter
        frozen, a hook set, evaluation mode), ValuesError, before weights change, where the loss or
        a gradient is NaN or infinite. With precision "fp16" a step whose gradients are not finite
        is passed over, on all ranks (`is_skipped`), as long as a smaller scale of the loss may
        help.

        Without `update` its gradients are kept for the next step with it, which takes the mean
        over all samples (or what `loss_weight` counts) since the last update.

        `fetch` names values inside the model, on any stage: a module, for the tensor that it
        returned and others use, or `BLOCK/TENSOR`, as `intermediates` has them. They are in
        `fetched` afterwards, whole, on rank 0's CPU; on other ranks that is {}. Until the step
        ends they stay on their devices.
        """
        if self._untouched is not None:
            self._untouched.check()
        with counted_step():
            return self._step(batch, update=update, fetch=fetch)

    def add(self, batch: Any, *, fetch: Iterable[str] = ()) -> Tensor:
        """Add the gradient of a global batch's mean loss to those since the last update; return the
        mean loss. Else as `step`.

        For loops that update apart: `finish_gradients`, perhaps `clip`, then `update`. Gradients
        are summed over ranks in `finish_gradients` (where ZeRO shards them, in here). Raises
        PlanError where gradients are finished already.
        """
        if self._added is not None and self._added.is_finished:
            raise PlanError(
                "a batch was added after gradients were finished (clipped); clip behind the last "
                "batch of an update"
            )
        if self._untouched is not None:
            self._untouched.check()
        with counted_step():
            return self._step(batch, update=False, fetch=fetch, apart=True)

    def finish_gradients(self, *, factor: float = 1.0) -> None:
        """Sum over ranks the gradients of what was added, and multiply them by `factor`."""
        added = self._added
        assert added is not None, "a batch is added before"
        if added.is_finished:
            return
        for index in self.stages:
            self.state.trained.start_sums(index)
        self._updates.finish_gradients(factor=factor, clips=False)
        added.is_finished = True

    def clip(self, max_norm: float) -> Tensor:
        """Scale finished gradients to a norm of at most `max_norm`; return the norm before."""
        assert self._added is not None, "gradients are finished before"
        assert self._added.is_finished, "gradients are finished before"
        return self._updates.clip(max_norm)

    def update(self) -> None:
        """Make the update of finished gradients; raise ValuesError where they are not finite."""
        added, self._added = self._added, None
        assert added is not None, "gradients are finished before"
        assert added.is_finished, "gradients are finished before"
        self._updates.change_weights(added.feed, added.loss, None)

    def forget_gradients(self) -> None:
        """Let go of the batches that were added and that no update followed."""
        self._accumulation.forget()
        self._added = None

    def _step(
        self, batch: Any, *, update: bool, fetch: Iterable[str], apart: bool = False
    ) -> Tensor:
        if not torch.is_grad_enabled():
            raise PlanError(
                "a step was made under torch.no_grad() or inference_mode(), where nothing has a "
                "gradient; call engine.step outside of them, or engine.evaluate for a loss alone"
            )
        # A bad batch is told before any gradient of the last step is lost.
        feed = self._feed(batch)
        if self._compiled is not None:
            self._compiled.meet(feed.bucket, feed.split)
        self._is_apart = apart
        # Gradients of an earlier batch without update are added to, not cleared.
        if not self._accumulation.is_open:
            self._updates.begin(is_apart=apart)
        with self.state.drawn(), self._watching(fetch, None) as seen:
            # (The batch's weight in the mean over all batches since the last update scales its
            # backwards.)
            losses = self._executor.train(
                self._updates.scaled(
                    self._accumulation.add_sum(feed)
                    if apart
                    else self._accumulation.add(feed, is_last=update)
                )
            )
        feed.check()
        # The loss is summed over ranks beside the reduction of gradients and the optimizer's step.
        loss, shared = self._share_loss(losses, feed)
        if update:
            self._updates.finish_gradients(clips=True)
            self._updates.change_weights(feed, loss, shared)
        else:
            self._updates.check_loss(feed, loss, shared)
        if apart:
            self._added = _Added(feed, loss)
        self.state.samples += feed.split.num_samples * self.plan.unit.size
        if shared is not None:
            shared.wait()
        self.fetched = self._gathered(seen) if seen.wanted else {}
        for tell in self.after_step:
            tell(loss)
        if update:
            # Last: what is told of a step is told with the rate it was made with.
            self._updates.step_schedulers()
        self._spans.end_step()
        return loss

    def evaluate(self, batch: Any, *, fetch: Iterable[str] = ()) -> Tensor:
        """Return the mean loss of one global batch, as the model computes it after ``eval()``.

        Nothing is dropped, norms read their running statistics (of the first replica, where each
        has its own), and no buffer changes. `fetch` is as in `step`: a module's name gives what it
        returned. The first call captures the model once more, if any part of it reads its mode;
        raises PlanError where it then computes what it does not in training.
        """
        programs = self._evaluation.programs
        with self._evaluation.running(), self._watching(fetch, programs) as seen:
            loss = self.forward(batch)
        self.fetched = self._gathered(seen) if seen.wanted else {}
        return loss

    def forward(self, batch: Any) -> Tensor:
        """Return the mean loss of one global batch as training computes it, without training."""
        with self.state.drawn():
            with torch.no_grad():  # (nothing of the batch is trained, whatever made it)
                feed = self._feed(batch)
            loss, shared = self._share_loss(self._executor.evaluate(feed), feed)
        feed.check()
        if shared is not None:
            shared.wait()
        return loss

    def average_weights(self, *, decay: float | None = 0.999, every: int = 1) -> WeightAverage:
        """Return the average of weights from now on, which each `every` updates move it.

        It is exponential (EMA) with `decay`, the mean (SWA) with None. Saved and loaded with the
        engine's checkpoints, from `average_weights` on. Every rank calls it, once.
        """
        if self.average is not None:
            raise PlanError("the engine's weights are averaged already; use engine.average")
        self.average = WeightAverage(
            self.state, decay=decay, every=every, is_accumulating=lambda: self.is_accumulating
        )
        self.after_step.append(self.average.take)
        return self.average

    def _feed(self, batch: Any) -> Feed:
        with self._executor.phase("its part of the batch, which all ranks agree on"):
            feed = self._feeder.feed(batch)
        self._take_dealt(feed.dealt)
        if self.state.zero_stage:
            zero.quiet_views()
        count = self.num_replicas
        parts = tuple(len(feed.split.part(0, count, part)) for part in range(count))
        self._lowered.take_shape(feed.bucket, feed.split, parts)
        # (Another engine of the script may have run since.)
        collectives.record(self._record_collective)
        return feed

    def _take_dealt(self, dealt: Dealt | None) -> None:
        """Show how a batch was dealt: in the timeline, and the first time in a line of rank 0."""
        self.dealt = dealt
        if dealt is None:
            return
        with self._spans.span(DEAL, dealt.told, on_host=True):
            pass
        is_new = dealt.order is not None and not self._has_told_dealt
        if is_new and self.mesh.global_rank == 0:
            self._has_told_dealt = True
            print(f"planner: {dealt.told}", file=sys.stderr, flush=True)

    def _after_forward(self, stage_index: int, num_samples: int) -> None:
        # FSDP2 keeps weights gathered for a backward that never comes.
        if self.state.zero_stage and not self._has_backward(stage_index):
            zero.end_without_backward(self.stages[stage_index])
        if self._statistics is not None:
            self._statistics.add(stage_index, num_samples)

    def _has_backward(self, stage_index: int) -> bool:
        """Whether a gradient arrives at a stage: not before the model's first trained parameter."""
        wiring = self.stages[stage_index].wiring
        return any(edge.requires_grad for edge in wiring.outgoing) or wiring.has_loss

    def _before_backward(self, stage_index: int, is_last: bool) -> None:
        if self.state.zero_stage:
            zero.before_backward(
                self.stages[stage_index],
                self.state.zero_stage,
                is_last=is_last,
                # (Apart, no backward is known to be the last: each brings its sums to the shards.)
                is_update=self._accumulation.is_last or self._is_apart,
            )

    def _after_gradients(self, stage_index: int) -> None:
        # Between batches of one update gradients stay local, so the sum over replicas is sent once.
        if self._accumulation.is_last:
            self.state.trained.start_sums(stage_index)

    def _share_loss(self, losses: list[Tensor], feed: Feed) -> tuple[Tensor, dist.Work | None]:
        """Return the mean loss, and what to wait for until it is that of all ranks."""
        # Ranks without the loss, and all but the first of the ranks with the same samples, add 0:
        # the sum over the world then counts each sample once.
        total = torch.zeros((), dtype=self._loss_dtype, device=self.mesh.device)
        if losses and self.mesh.is_first_of_samples:
            weights = torch.stack(tuple(feed.loss_weights))
            # A part in which nothing counts has no mean: its loss may be NaN.
            shares = torch.where(weights == 0, weights, torch.stack(losses) * weights)
            total = shares.sum()
        # Asynchronous: the message runs beside the gradient sums and the optimizer's step.
        alone = self.plan.world_size == 1
        return total, None if alone else dist.all_reduce(total, async_op=True)

    def intermediates(self, batch: Any, names: Iterable[str]) -> dict[str, Tensor]:
        """Return values inside the model for one global batch, whole, on rank 0's CPU.

        `planner.runtime.step.intermediates` says what names there are; every rank calls this.
        """
        with self._watching(names, None) as seen:
            self.forward(batch)
        return self._gathered(seen)

    def _watching(
        self, names: Iterable[str], programs: Programs | None
    ) -> AbstractContextManager[Seen]:
        """Inside, named values are noted, of the programs of training where none are given."""
        return watching(self.state, names, programs or self._programs, lambda: self._executor.job)

    def _gathered(self, seen: Seen) -> dict[str, Tensor]:
        order = None if self.dealt is None else self.dealt.order
        return gathered(self.state, seen, self._runs_of_fetched, order)

    def shard_tensor(self, tensor: Tensor, **dims: int) -> DTensor:
        """Return a tensor of the script's, equal on all ranks, cut over those of this stage's mesh:
        ``engine.shard_tensor(table, tp=0)``. See `planner.runtime.state.users_module.user_tensors`.
        """
        from planner.runtime.state.users_module.user_tensors import shard_tensor

        return shard_tensor(tensor, self.mesh, dims)

    def close(self) -> None:
        """Give the process groups made for this engine back; all ranks call it, last.

        Waits for a save under way, and raises what it failed with.
        """
        if self._checkpoints is not None:
            self._checkpoints.close()
        collectives.record(None)
        if self.state.random is not None:
            self.state.random.close()
        self.mesh.close()

    # -- checkpoints --------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to save all of the training as a new checkpoint in `folder`, and return.

        Every rank calls it after the same step. Files are written beside the steps that follow;
        the next `save`, `load`, `wait_for_save` or `close` waits for them and raises PlanError
        where they could not be written. `folder` is one that all ranks reach; in it the newest
        `keep` checkpoints stay. `extra` gives by name what else is to be saved, each with a
        `state_dict` and a `load_state_dict`: scalers, the script's own schedulers, and other
        engines, whose checkpoints are written first, each in a folder of its name within `folder`.
        Schedulers that `planner.apply` was given are saved in any case.
        """
        self._accumulation.refuse_open("engine.save")
        given = self._with_own(extra or {}, Path(folder))
        for each in given.values():
            if isinstance(each, Beside):
                each.save(keep)
        self._own_checkpoints().save(Path(folder), keep=keep, extra=given)

    def _with_own(self, extra: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return what the script saves beside in a folder, and the engine's own: the schedulers
        that it steps, what scales the loss, and which sizes are compiled.
        """
        given = {id(each) for each in extra.values()}
        own: dict[str, Any] = {
            f"{OWN_SCHEDULER}{n}": each for n, each in enumerate(self._schedulers)
        }
        if self.scaler is not None:
            own[OWN_SCALER] = self.scaler
        if self._compiled is not None:
            own[OWN_SIZES] = self._compiled
        beside = {
            name: Beside(each, folder / name) if isinstance(each, Engine) else each
            for name, each in extra.items()
        }
        return {**beside, **{name: each for name, each in own.items() if id(each) not in given}}

    @property
    def last_saved(self) -> str:
        """On rank 0, the name of the last checkpoint that was written; empty without one."""
        return "" if self._checkpoints is None else self._checkpoints.saved

    def wait_for_save(self) -> None:
        """Return when the last save is on the disk. Raises PlanError where it could not be."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def load(
        self, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
    ) -> Loaded:
        """Take up the training that was saved, under whatever plan; every rank calls it.

        `path` is a folder that `save` wrote to, of which the newest whole checkpoint is taken, or
        one checkpoint in it. `extra` gives what `save` was given. Raises PlanError where no
        checkpoint is whole, or is of another model.
        """
        self._accumulation.forget()
        folder = Path(path).parent if is_checkpoint(Path(path)) else Path(path)
        loaded = self._own_checkpoints().load(Path(path), extra=self._with_own(extra or {}, folder))
        for tell in self.after_load:
            tell()
        return loaded

    @property
    def counted(self) -> tuple[float, ...]:
        """How much each batch of the last update counted: by its samples, labels or loss weight."""
        return self._accumulation.counted

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of batches wait for the step that updates."""
        return self._accumulation.is_open

    def resume(self, *, extra: Mapping[str, Any] | None = None) -> Loaded | None:
        """Go on from the newest whole checkpoint of a run that its launcher keeps.

        Every rank calls it, after `planner.apply`. Returns None where the run begins, or is not
        kept. `extra` is as in `save`, and saved by each `keep`.
        """
        return self._own_kept().resume(extra or {})

    def keep(self, *, now: bool = False) -> None:
        """Begin to save if a checkpoint of a kept run is due; every rank calls it after a step.

        With `now` it is due, as at the last step: what is converted is the newest checkpoint.
        """
        self._own_kept().keep(now=now)

    def _hold(self) -> None:
        """Wait until a save under way has copied weights and optimizer state."""
        if self._checkpoints is not None:
            self._checkpoints.hold()

    def _own_kept(self) -> Kept:
        if self._kept is None:
            from planner.runtime.checkpoint.kept import Kept

            self._kept = Kept(self)
        return self._kept

    def _own_checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            from planner.runtime.checkpoint.checkpoints import Checkpoints

            self._checkpoints = Checkpoints(self.state)
        return self._checkpoints

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Take the model's parameters and buffers from files; each rank reads its pieces alone.

        `path` is safetensors (a file, or a folder with an index as Hugging Face has it), a
        ``.pt`` file with a `state_dict`, or a checkpoint. Buffers that are not there stay. Every
        rank calls it. Raises PlanError where a parameter is not there, or has another shape.
        """
        self._own_checkpoints().load_weights(Path(path))

    # -- what it holds ------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers on rank 0's CPU; {} elsewhere.

        Every rank calls it. Names are the user's, a tied parameter under each of its names.
        With precision "bf16" or "fp16" the values are the fp32 copies that the optimizer trains.
        """
        return self.state.full_state_dict()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the last update's gradients, whole, on rank 0's CPU; {} elsewhere.

        A parameter that got no gradient has zeros. Every rank calls it.
        """
        self._accumulation.refuse_open("engine.full_gradients")
        wanted = [t for t in self.graph.params if t.requires_grad]
        held, placements = self.state.trained.by_name(), self.state.placements
        return self.state.gathered(
            wanted, lambda meta: (_grad_of(held[meta.fqn][0]), placements[meta.name])
        )

    @property
    def has_mean_loss(self) -> bool:
        """Whether the loss of a batch that was added is a mean, in all of its terms."""
        return self._accumulation.are_means

    @property
    def is_random(self) -> bool:
        """Whether the model draws random numbers."""
        return self.state.random is not None

    def samples_of(self, batch: Any) -> int:
        """How many samples a whole batch has."""
        return self._feeder.samples_of(batch)


def _grad_of(param: nn.Parameter) -> Tensor:
    table = table_of(param)
    if table is not None and (rows := table.gradient()) is not None:
        return rows.to_dense()
    return torch.zeros_like(param) if param.grad is None else param.grad
