"""`planner verify`: a plan computes what one process computes, shown by training both.

A few steps are trained under the plan, and in one process by the user's unmodified module
called on the whole batch, from the same weights and data, in fp64 and without dropout,
whatever the plan's precision. The single process (`planner.runtime.proofs.one_process`) reads
nothing of lowering, schedules or collectives. Losses, gradients and their norm, updated parameters
and buffers are compared, each tensor beside its rounding, which is measured and not assumed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.capture.diagnose import first_line
from planner.capture.modes.fixed_draws import FixedDraws
from planner.capture.source.model_file import ModelSource, load_model_file
from planner.errors import ModelError, PlanError
from planner.language.across import blocks_across_samples, follows_from_parts
from planner.language.across.cut.moved_once import moved_once
from planner.language.across.cut.whole_batch import graph_under, refuse_cut
from planner.language.graph import ModelGraph, TensorMeta
from planner.language.graph.batch import flatten_batch, unflatten_batch
from planner.language.graph.batch_split import BatchSplit
from planner.language.graph.function_keys import AUTOGRAD_FUNCTION
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.layout.axes import own_axes, rest_axis
from planner.language.lowering.wiring import stage_of
from planner.language.ops.samples.state import ADDED, SCALED
from planner.language.plan import Plan, load_plan, low_dtype
from planner.runtime.apply import shared_capture
from planner.runtime.batches.inputs.feed import CutBatch, cut_batch
from planner.runtime.batches.inputs.whole_batch import WholeBatchValues
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs.adam_of_rows import AdamOfRows
from planner.runtime.proofs.one_process import (
    NORM,
    OneProcess,
    Piece,
    Step,
    build_with_values,
)
from planner.runtime.proofs.promote import (
    ReferenceMode,
    drawing_ops,
    has_dropout,
    in_fp64,
    promote_graph,
    promote_module,
)
from planner.runtime.proofs.users_errors import told_as_users
from planner.runtime.state.out_of_memory import is_out_of_memory
from planner.runtime.state.weights import constant
from planner.runtime.step.engine import Engine
from planner.units import format_bytes

# How much of the largest loss, gradient, parameter or buffer a difference may be, whatever the
# rounding. A model in which rounding is more can't be verified.
TOLERANCE = 1e-9

# How many times its measured rounding a tensor may differ by. docs/training.md has the
# measurements it was chosen from.
ROUNDINGS = 1000.0

Progress = Callable[[float, str], None]

KINDS = ("loss", "gradient", "norm", "parameter", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The worst difference of a kind of tensor, and the tensor and step it was found in.

    `relative` is the largest difference of an entry, `rounding` what one process was measured
    to have in that tensor, both over the largest entry of all tensors of the kind.
    """

    relative: float
    rounding: float
    name: str
    step: int

    @property
    def times(self) -> float:
        """How many times the measured rounding the difference is."""
        if self.relative == 0:
            return 0.0
        return self.relative / self.rounding if self.rounding else float("inf")


_NONE = Difference(relative=0.0, rounding=0.0, name="", step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    A difference is a fault beyond `ROUNDINGS` times the rounding measured, and beyond
    `tolerance` in any case.

    Attributes:
        steps: of training that were compared.
        num_ranks: of the plan.
        tolerance: the largest relative difference that is no fault.
        loss: the worst difference of a loss.
        gradient: that of a gradient.
        norm: that of the norm of all gradients, by which a training clips them.
        parameter: that of a parameter after the optimizer's step.
        buffer: that of a buffer.
        losses: the plan's, step by step.
        reference_losses: the single process's.
        notes: what was switched off or cut down to compare, as sentences.
    """

    steps: int = 0
    num_ranks: int
    tolerance: float
    loss: Difference = _NONE
    gradient: Difference = _NONE
    norm: Difference = _NONE
    parameter: Difference = _NONE
    buffer: Difference = _NONE
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    notes: tuple[str, ...]

    @property
    def worst(self) -> Difference:
        """Of the worst difference of each kind, the one nearest to a bound, or most beyond."""
        worst = _NONE
        for kind in KINDS:
            worst = self._worse(worst, getattr(self, kind))
        return worst

    @property
    def largest(self) -> float:
        """The largest of the relative differences."""
        return max(getattr(self, kind).relative for kind in KINDS)

    @property
    def passed(self) -> bool:
        """Whether all differences are within both bounds (a NaN is not)."""
        return self._excess(self.worst) <= 1

    @property
    def is_undecided(self) -> bool:
        """Whether all that is beyond a bound is less than the one process's own rounding.

        Rounding grows from step to step, a thousandfold where a model is ill-conditioned
        (statistics of few numbers), and hides what a plan may do wrong; fewer steps show it.
        """
        return not self.passed and all(getattr(self, kind).times <= 1 for kind in KINDS)

    def after_step(self, found: Step, expected: Step, others: Sequence[Step]) -> VerifyReport:
        """Return the report with one more step in it, see `_differences`."""
        worst = {kind: getattr(self, kind) for kind in KINDS}
        for kind, difference in _differences(found, expected, others, self.steps):
            worst[kind] = self._worse(worst[kind], difference)
        return replace(
            self,
            steps=self.steps + 1,
            losses=(*self.losses, found["loss"]["loss"].item()),
            reference_losses=(*self.reference_losses, expected["loss"]["loss"].item()),
            **worst,
        )

    def _excess(self, found: Difference) -> float:
        """The share of what is allowed that a difference is, of the bound that is nearer."""
        shares = (found.relative / self.tolerance, found.times / ROUNDINGS)
        return next((share for share in shares if math.isnan(share)), max(shares))

    def _worse(self, difference: Difference, other: Difference) -> Difference:
        if not difference.name or math.isnan(self._excess(other)):
            return other
        return other if self._excess(other) > self._excess(difference) else difference


def verify(
    plan_path: str | os.PathLike[str],
    model_path: str | os.PathLike[str],
    *,
    steps: int = 3,
    device: str | None = "cpu",
    tolerance: float = TOLERANCE,
    progress: Progress | None = None,
) -> VerifyReport:
    """Train under the plan and in one process, and return how far they are apart.

    Starts the plan's ranks on this machine. Raises PlannerError for a plan or model that
    can't run; RuntimeError when a rank fails.
    """
    from planner.runtime.start.launch import check_runnable
    from planner.runtime.start.workers import run_workers

    plan = load_plan(plan_path)
    source = load_model_file(model_path)
    device = check_runnable(plan, device)
    if steps < 1:
        raise PlanError(f"steps={steps} must be at least 1 step of training")
    with tempfile.TemporaryDirectory(prefix="planner-verify-") as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(
            json.dumps(
                {
                    "plan": os.fspath(Path(plan_path).resolve()),
                    "model": os.fspath(source.path),
                    "steps": steps,
                    "tolerance": tolerance,
                    "answer": os.fspath(answer),
                }
            )
        )
        if progress is not None:
            progress(0.1, f"training {steps} steps on {plan.world_size} ranks and on one")
        code = run_workers(["--verify", str(request)], num_ranks=plan.world_size, device=device)
        if progress is not None:
            progress(1.0, "compared")
        if code or not answer.exists():
            raise RuntimeError(f"a rank ended with code {code} and left no report")
        return report_from_json(json.loads(answer.read_text()))


def check_memory(graph: ModelGraph, device: str | None, have_bytes: int | None = None) -> None:
    """Raise PlanError where the host can't hold what `verify` trains at the least; on CPU alone.

    The one process and the ranks together each hold weights and gradients in fp64. `have_bytes` is
    the host's memory; None: this one's.
    """
    from planner.runtime.process.device import device_type

    if device_type(device) != "cpu":
        return
    if have_bytes is None:
        have_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = sum(tensor.numel_at(1) for tensor in graph.tensors if tensor.kind == "param")
    # 8 bytes in fp64, of weights and gradients, on the ranks and in the one process.
    needed = count * 8 * 2 * 2
    if needed > have_bytes:
        raise PlanError(
            f"{count:,} parameters take {format_bytes(needed)} at least, with their gradients in "
            f"fp64 on the ranks and on one process, and this machine has "
            f"{format_bytes(have_bytes)}; prove the plan part by part with `by_block`, which "
            "takes less"
        )


def verify_worker(request: Path) -> None:
    """Do one rank's part of `verify`; rank 0 writes the answer."""
    asked = json.loads(request.read_text())
    plan, source = load_plan(asked["plan"]), load_model_file(asked["model"])
    try:
        with told_as_users(
            source.path.name, "training in fp64, in one process or the plan's ranks,"
        ):
            report = compare_with_one_process(
                plan, source, steps=asked["steps"], tolerance=asked["tolerance"]
            )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise PlanError(
            "the ranks and the one process, which train in fp64 beside each other, take more "
            f"memory than there is ({first_line(error)}); prove the plan part by part with "
            "`by_block`, which takes less"
        ) from error
    if report is not None:
        Path(asked["answer"]).write_text(json.dumps(asdict(report)))


def report_from_json(data: Mapping[str, Any]) -> VerifyReport:
    """Inverse of `dataclasses.asdict` through JSON."""
    kinds = {key: Difference(**data[key]) for key in KINDS}
    lists = {key: tuple(data[key]) for key in ("losses", "reference_losses", "notes")}
    return VerifyReport(**{**data, **kinds, **lists})


def compare_with_one_process(
    plan: Plan,
    source: ModelSource,
    *,
    steps: int = 3,
    tolerance: float = TOLERANCE,
    graph: ModelGraph | None = None,
    make_engine: Callable[..., Engine] = Engine,
) -> VerifyReport | None:
    """Compare on the ranks that are running; rank 0 gets the report, others None.

    Rank 0 is the one process too. `graph` is the model's capture where all ranks have it
    already. `make_engine` stands in for Engine where a test breaks it.
    """
    from planner.runtime.process.device import choose_device

    smaller = _shortened(plan)
    mesh = build_mesh(smaller, choose_device())
    module = build_with_values(source)
    if graph is None:
        graph = shared_capture(smaller, module, source.loss, mesh)
    is_weighted = callable(source.loss_weight)
    refuse_cut(graph, plan, weighted_loss=is_weighted)
    replicas = _replicas(graph_under(graph, smaller), smaller, weighted_loss=is_weighted)
    notes = _notes(plan, smaller, graph, replicas)
    if plan.kernels == "graphs" and mesh.device.type != "cuda":
        smaller = smaller.model_copy(update={"kernels": "compiled"})
        notes += (
            f"this is {mesh.device.type}, where there are no CUDA graphs: blocks were run compiled",
        )
    # The capture of a cast model, with its blocks and layouts, is run in fp64 like any other.
    smaller = smaller.model_copy(update={"precision": "model"})
    draws = FixedDraws if drawing_ops(graph) else nullcontext
    cast_to = low_dtype(plan.precision)
    own = getattr(torch, cast_to) if cast_to else _usual_dtype(module)
    promote_module(module)
    references = []
    if dist.get_rank() == 0:
        once = {graph.tensor[name] for name in moved_once(graph)}
        settings: dict[str, Any] = {
            "optimizer": _optimizer,
            "own": own,
            "draws": draws,
            "moved_once": {name for meta in once for name in (meta.fqn, *meta.aliases)},
        }
        # Where samples meet, or values of the whole batch are taken, their order may be a part of
        # what is computed (offsets into one list): another order would be another training.
        in_any_order = follows_from_parts(graph) and graph.whole is None
        # Three runs of the same training that differ by rounding alone: what they are apart by is
        # the rounding of each tensor.
        references = [
            OneProcess(source, module, **settings),
            OneProcess(source, module, **settings, moved=1, backwards=in_any_order),
            OneProcess(source, module, **settings, moved=2),
        ]
    # A graph has been promoted; the user's own code that it calls has not.
    functions: Callable[[], AbstractContextManager[Any]] = nullcontext
    if any(
        op.target in (AUTOGRAD_FUNCTION, OPAQUE_MODULE)
        for program in graph.classes
        for op in program.ops
    ):
        functions = partial(ReferenceMode, own, torch.get_default_dtype())
    report = VerifyReport(num_ranks=plan.world_size, tolerance=tolerance, notes=notes)
    wide = promote_graph(graph)
    whole = WholeBatchValues(wide, graph_under(wide, smaller), {}, partial(_values_of, module))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        engine = make_engine(
            smaller,
            wide,
            module,
            mesh,
            optimizer=_optimizer,
            loss_weight=source.loss_weight,
            # The norm is made and nothing is clipped: gradients are those of the step.
            max_grad_norm=math.inf,
        )
        for step in range(steps):
            # The one process goes first: what fails in the user's code does so under their line.
            expected, others = None, []
            batch = _batch(source, smaller, step) if references else None
            if references:
                cut = cut_batch(batch, graph, smaller)
                pieces = _pieces(cut.split, replicas)
                weigh = partial(_piece_weights, whole)
                expected, *others = (ref.step(cut, pieces, weigh) for ref in references)
                _refuse_nan(expected, step)
            batch = _shared(batch, engine)
            with draws(), functions():
                loss = engine.step(batch)
            found = _made(engine, loss)
            if expected is not None:
                report = report.after_step(found, expected, others)
    finally:
        torch.set_default_dtype(before)
    return report if references else None


def _optimizer(params: Any) -> torch.optim.Optimizer:
    """AdamW, with an epsilon and a decay that make differences plain.

    Adam divides a gradient by its own size, so where a gradient is zero but for rounding
    (a key bias in attention) rounding would become a full step; this epsilon prevents it. The
    decay shows whether both sides decay the same parameters: torch skips those without gradient.
    """
    return AdamOfRows(params, lr=1e-2, eps=1e-3, weight_decay=0.1)


def _notes(plan: Plan, run: Plan, graph: ModelGraph, replicas: int | None) -> tuple[str, ...]:
    """What the plan that is run, and both sides, differ in from the plan and the model given."""
    notes = []
    if run != plan:
        notes.append(
            f"{run.num_microbatches} of the plan's {plan.num_microbatches} microbatches were run"
        )
    if low_dtype(plan.precision):
        notes.append(
            f"the plan's {plan.precision} was run in fp64: what is shown is that its layout "
            "computes what one process computes, to the last digits; rounding to "
            f"{plan.precision} is no part of it"
        )
    if has_dropout(graph):
        notes.append("dropout was switched off on both sides")
    if drawn := drawing_ops(graph):
        few = ", ".join(drawn[:3]) + (f" and {len(drawn) - 3} more" * (len(drawn) > 3))
        notes.append(
            f"the model draws random numbers ({few}): both sides were given the same fixed ones, "
            "so everything but the drawing itself was compared"
        )
    if replicas is not None:
        notes.append(
            "the model computes across samples or moves buffers (statistics of the batch, or "
            "samples compared with each other), so the one process also went microbatch by "
            "microbatch, with buffers of its own for each replica's samples"
        )
    return tuple(notes)


def _shortened(plan: Plan) -> Plan:
    """The plan with few enough microbatches for a quick proof; their number proves nothing."""
    if plan.table:
        return plan
    # Enough for warm-up, steady state and drain of a pipeline.
    enough = min(plan.num_microbatches, max(2, 2 * plan.pp))
    return plan.model_copy(update={"num_microbatches": enough})


def _replicas(graph: ModelGraph, plan: Plan, *, weighted_loss: bool = False) -> int | None:
    """The replicas by which ops see samples that compute across them; None: no such ops.

    With a `weighted_loss` the user counts parts of what it is divided by.

    Raises PlanError where that is not one number, which no one process can repeat.
    """
    found = blocks_across_samples(graph, weighted_loss=weighted_loss)
    across = [block for block in graph.blocks if block.index in found]
    stages = {stage_of(plan, block.index) for block in across}
    replicas = {plan.stage_degrees(stage).along("batch") for stage in stages}
    if len(replicas) > 1:
        each = plan.unit.size
        sizes = sorted({plan.stage_microbatch_size(stage) * each for stage in stages})
        raise PlanError(
            f"blocks {across[0].name} to {across[-1].name} compute across samples (statistics of "
            "the batch, or samples compared with each other), and their stages, of different "
            f"{rest_axis().name}, see {' and '.join(map(str, sizes))} samples at a time; give "
            f"those stages the same {' and '.join(axis.name for axis in own_axes())} to verify "
            "the plan"
        )
    return replicas.pop() if replicas else None


def _pieces(split: BatchSplit, replicas: int | None) -> list[Piece]:
    """The samples to give to the one process at a time, in the plan's order."""
    if replicas is None:
        return [Piece(replica=0, samples=range(split.num_samples))]
    return [
        Piece(replica=replica, samples=split.part(microbatch, replicas, replica))
        for microbatch in range(split.num_microbatches)
        for replica in range(replicas)
    ]


def _piece_weights(
    whole: WholeBatchValues, cut: CutBatch, runs: Sequence[range]
) -> Sequence[float]:
    """Return what the loss of each piece of a batch counts for in the batch's.

    Raises PlanError for a loss of which pieces are no terms.
    """
    share, terms = whole.shares.share, whole.shares.terms
    if share == ADDED:
        return [1.0] * len(runs)
    if share == SCALED:
        if len(terms) > 1:
            raise PlanError(
                "the loss has terms that count parts of a batch differently, and blocks compute "
                "statistics over the batch, so no one process gives it part by part; give `batch` "
                "labels that count alike to verify the plan"
            )
        (share,) = terms
    name = whole.shares.counts.get(share, share)
    counts = [each[name] for each in whole.counts_of(cut, runs)]
    return [count / sum(counts) for count in counts]


def _values_of(module: nn.Module, meta: TensorMeta) -> Tensor:
    """Return a buffer's values, of the module or of the graph itself."""
    if meta.data is not None:
        return constant(meta)
    found: Tensor = attrgetter(meta.fqn)(module)
    return found.detach().clone()


def _usual_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most of a module's weights."""
    counts: Counter[torch.dtype] = Counter()
    for param in module.parameters():
        if param.is_floating_point():
            counts[param.dtype] += param.numel()
    return counts.most_common(1)[0][0] if counts else torch.get_default_dtype()


def _batch(source: ModelSource, plan: Plan, step: int) -> Any:
    """The batch of a step, in fp64."""
    torch.manual_seed(1000 + step)
    with torch.device("cpu"):
        batch = source.batch(plan.global_batch)
    leaves, tree = flatten_batch(batch)
    for path, tensor in leaves.items():
        if tensor.is_meta:
            raise ModelError(
                f"batch({plan.global_batch}) of {source.path.name} has {path} on the meta device, "
                "without values; verify trains on its batches, so give values"
            )
    # Several runs read it: none may go back through what the user's function made it of.
    return unflatten_batch(tree, {path: in_fp64(t.detach()) for path, t in leaves.items()})


def _refuse_nan(made: Step, step: int) -> None:
    """Refuse a step of the one process that leaves no numbers to compare with."""
    for kind in ("loss", "gradient"):
        for name, tensor in made[kind].items():
            if tensor.isnan().any():
                what = "the loss" if kind == "loss" else f"the gradient of {name}"
                raise ModelError(
                    f"{what} is NaN in step {step + 1} of one process, in fp64, so there is "
                    "nothing to compare a plan with; mend the model or its batches"
                )


def _shared(batch: Any, engine: Engine) -> Any:
    """Rank 0's batch, on every rank."""
    payload = [batch]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(payload, src=0, group=engine.mesh.control)
    return payload[0]


def _made(engine: Engine, loss: Tensor) -> Step:
    """Return what a step under the plan made; whole tensors are on rank 0."""
    gradients, state = engine.full_gradients(), engine.full_state_dict()
    assert engine.grad_norm is not None, "the engine clips"
    return {
        "loss": {"loss": loss.detach().cpu()},
        "gradient": gradients,
        "norm": {NORM: engine.grad_norm.cpu()},
        "parameter": state,
        "buffer": state,
    }


def _differences(
    found: Step, expected: Step, others: Sequence[Step], step: int
) -> Iterator[tuple[str, Difference]]:
    """Yield the difference of each tensor with its kind.

    The rounding of a tensor is the largest distance of `others`, which differ from `expected`
    by rounding alone. It is at least that of one operation: two runs can agree by chance, in
    a tensor of few entries. A difference of one rounding of the kind's largest entry is none.
    A frozen parameter has no rounding.
    """
    largest = {
        kind: max(map(_size, tensors.values()), default=0.0) for kind, tensors in expected.items()
    }
    # A loss whose terms cancel is no measure for itself.
    largest["loss"] = max(largest["loss"], largest["gradient"])
    for kind, tensors in expected.items():
        # (Not 0: a kind whose tensors are all zero.)
        scale = max(largest[kind], torch.finfo(torch.float64).tiny)
        for name, tensor in tensors.items():
            other = found[kind].get(name)
            if other is None and kind == "gradient":
                other = torch.zeros_like(tensor)  # none is as good as zero
            if other is None:
                yield kind, _missing(name, step)
                continue
            rounding = max(_gap(tensor, each[kind][name]) for each in others)
            # `ROUNDINGS` times the second term is one rounding of the kind's largest entry.
            least = torch.finfo(torch.float64).eps * max(_size(tensor), scale / ROUNDINGS)
            if kind == "parameter" and name not in expected["gradient"]:
                rounding = least = 0.0  # frozen: no step rounds it, so every bit must be as it was
            yield (
                kind,
                Difference(
                    relative=_gap(tensor, other) / scale,
                    rounding=max(rounding, least) / scale,
                    name=name,
                    step=step,
                ),
            )


def _missing(name: str, step: int) -> Difference:
    return Difference(relative=float("inf"), rounding=0.0, name=f"{name} (missing)", step=step)


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of an entry; equal infinities are no difference, any NaN is."""
    wide_dtype = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to("cpu", wide_dtype), b.to("cpu", wide_dtype)
    apart = torch.where(a == b, 0.0, (a - b).abs())
    return apart.max().item() if apart.numel() else 0.0


def _size(tensor: Tensor) -> float:
    """The size of the largest finite entry."""
    sizes = tensor.abs().double()
    return sizes[sizes.isfinite()].max().item() if sizes.isfinite().any() else 0.0
