"""`planner verify`: a plan computes what one process computes, shown by training both.

A few steps are trained under the plan, and in one process by the user's unmodified module
called on the whole batch, from the same weights and data, in fp64 and without dropout,
whatever the plan's precision. The one process knows nothing of capture, lowering,
schedules or collectives. Reported is the largest relative difference of losses, of
gradients and of updated parameters.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.batch import call_with_batch, flatten_batch, loss_of, unflatten_batch
from planner.batch_statistics import pairing_ops
from planner.blocks import mutates
from planner.errors import PlanError
from planner.graph import ModelGraph
from planner.model_file import ModelSource, load_model_file
from planner.plan import Plan, load_plan
from planner.runtime.apply import shared_capture
from planner.runtime.engine import Engine
from planner.runtime.mesh import build_mesh
from planner.runtime.promote import ReferenceMode, has_dropout, promote_graph
from planner.runtime.wiring import stage_of

TOLERANCE = 1e-9

Progress = Callable[[float, str], None]

# Adam divides a gradient by its own size, so where a gradient is zero but for rounding
# (a key bias in attention) rounding would become a full step; this epsilon prevents it.
_ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}

# Sums of the same n terms in another order differ by about sqrt(n) roundings of a term; this
# allows for a quarter of a million terms. (A bias before BatchNorm, whose terms cancel, was
# seen to differ by 94 roundings of its layer's weight gradient.)
_ROUNDING = 512 * torch.finfo(torch.float64).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest relative difference found, and the tensor and step it was found in."""

    relative: float
    name: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found. `losses` are the plan's, `reference_losses` the one process's.

    `notes` say what was switched off or cut down to compare, as sentences.
    """

    steps: int
    num_ranks: int
    tolerance: float
    loss: Difference
    gradient: Difference
    parameter: Difference
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    notes: tuple[str, ...]

    @property
    def largest(self) -> float:
        """The largest of the three relative differences."""
        return max(self.loss.relative, self.gradient.relative, self.parameter.relative)

    @property
    def passed(self) -> bool:
        """Whether all differences are within the tolerance (a NaN is not)."""
        return self.largest <= self.tolerance


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
    from planner.runtime.launch import check_runnable
    from planner.runtime.workers import run_workers

    plan = load_plan(plan_path)
    source = load_model_file(model_path)
    device = check_runnable(plan, device)
    if steps < 1:
        raise PlanError(f"steps={steps} must be at least 1")
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
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code or not answer.exists():
            raise RuntimeError(f"a rank ended with code {code} and left no report")
        return report_from_json(json.loads(answer.read_text()))


def verify_worker(request: Path) -> None:
    """Do one rank's part of `verify`; rank 0 writes the answer."""
    asked = json.loads(request.read_text())
    report = compare_with_one_process(
        load_plan(asked["plan"]),
        load_model_file(asked["model"]),
        steps=asked["steps"],
        tolerance=asked["tolerance"],
    )
    if report is not None:
        Path(asked["answer"]).write_text(json.dumps(asdict(report)))


def report_from_json(data: Mapping[str, Any]) -> VerifyReport:
    """Inverse of `dataclasses.asdict` through JSON."""
    kinds = {key: Difference(**data[key]) for key in ("loss", "gradient", "parameter")}
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
    from planner.runtime.device import choose_device

    notes = []
    smaller = _shortened(plan)
    if smaller != plan:
        run, planned = smaller.num_microbatches, plan.num_microbatches
        notes.append(f"{run} of the plan's {planned} microbatches were run")
    mesh = build_mesh(smaller, choose_device())
    torch.manual_seed(0)
    module = source.build()
    if graph is None:
        graph = shared_capture(smaller, module, source.loss, mesh)
    if smaller.precision == "bf16":
        # The capture of the cast model, whose blocks and layouts these are, in fp64.
        smaller = smaller.model_copy(update={"precision": "model"})
        notes.append(
            "the plan's bf16 was run in fp64: what is shown is that its layout computes what one "
            "process computes, to the last digits; rounding to bf16 is no part of it"
        )
    if has_dropout(graph):
        notes.append("dropout was switched off on both sides")
    module = module.double()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        piece_size = _piece_size(graph, smaller)
        reference = _OneProcess(module, source, piece_size, smaller)
        if piece_size is not None:
            notes.append(
                "the model computes across samples (statistics of the batch, or samples compared "
                "with each other), so the one process also went microbatch by microbatch"
            )
        engine = make_engine(
            smaller,
            promote_graph(graph),
            module,
            mesh,
            optimizer=lambda params: torch.optim.AdamW(params, **_ADAMW),
        )
        return _train_both(engine, reference, source, steps, tolerance, tuple(notes))
    finally:
        torch.set_default_dtype(before)


def _shortened(plan: Plan) -> Plan:
    """The plan with few enough microbatches for a quick proof; their number proves nothing."""
    if plan.table:
        return plan
    enough = min(plan.num_microbatches, max(2, 2 * plan.pp))
    return plan.model_copy(update={"num_microbatches": enough})


def _piece_size(graph: ModelGraph, plan: Plan) -> int | None:
    """The samples at a time that ops see which compute across them; None: no such ops.

    Raises PlanError where that is not one number, which no one process can repeat.
    """
    across = [
        block
        for block in graph.blocks
        for program in [graph.classes[block.class_index]]
        if any(mutates(op) for op in program.ops) or pairing_ops(program)
    ]
    sizes = {plan.stage_microbatch_size(stage_of(plan, block.index)) for block in across}
    if len(sizes) > 1:
        raise PlanError(
            f"blocks {across[0].name} to {across[-1].name} compute across samples (statistics of "
            "the batch, or samples compared with each other), and their stages, of different dp, "
            f"see {' and '.join(map(str, sorted(sizes)))} samples at a time; give those stages "
            "the same tp to verify the plan"
        )
    return sizes.pop() if sizes else None


class _OneProcess:
    """The user's module trained alone on rank 0; mutable. Elsewhere it does nothing."""

    def __init__(
        self, module: nn.Module, source: ModelSource, piece_size: int | None, plan: Plan
    ) -> None:
        """With a `piece_size` it goes that many samples at a time."""
        self._piece_size = piece_size
        self._here = dist.get_rank() == 0
        self._source, self._plan = source, plan
        if self._here:
            self._module = copy.deepcopy(module)
            self._optimizer = torch.optim.AdamW(self._module.parameters(), **_ADAMW)

    def step(self, batch: Any) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """Return loss, gradients and updated parameters of one step."""
        if not self._here:
            return 0.0, {}, {}
        self._optimizer.zero_grad()
        pieces = [batch] if self._piece_size is None else self._pieces(batch, self._piece_size)
        total = 0.0
        with ReferenceMode():
            for piece in pieces:
                output = call_with_batch(self._module, piece)
                loss = loss_of(output, piece, self._source.loss) / len(pieces)
                loss.backward()
                total += loss.item()
        named = dict(self._module.named_parameters(remove_duplicate=False))
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in named.items()
            if p.requires_grad
        }
        self._optimizer.step()
        return total, grads, {n: p.detach().clone() for n, p in named.items()}

    def _pieces(self, batch: Any, size: int) -> list[Any]:
        leaves, tree = flatten_batch(batch)
        samples = self._plan.global_batch
        return [
            unflatten_batch(
                tree,
                {
                    path: t[i : i + size] if t.ndim and t.shape[0] == samples else t
                    for path, t in leaves.items()
                },
            )
            for i in range(0, samples, size)
        ]


def _train_both(
    engine: Engine,
    reference: _OneProcess,
    source: ModelSource,
    steps: int,
    tolerance: float,
    notes: tuple[str, ...],
) -> VerifyReport | None:
    losses: list[float] = []
    reference_losses: list[float] = []
    worst = dict.fromkeys(
        ("loss", "gradient", "parameter"), Difference(relative=0.0, name="", step=0)
    )
    for step in range(steps):
        batch = _shared_batch(source, engine, step)
        expected_loss, expected_grads, expected_params = reference.step(batch)
        losses.append(engine.step(batch).item())
        reference_losses.append(expected_loss)
        grads, params = engine.full_gradients(), engine.full_state_dict()
        if dist.get_rank() != 0:
            continue
        found = {
            "loss": _difference({"loss": losses[-1]}, {"loss": expected_loss}, step),
            "gradient": _difference(grads, expected_grads, step),
            "parameter": _difference(params, expected_params, step),
        }
        # not (a <= b) instead of a > b: a NaN must win.
        worst = {
            k: d if not (d.relative <= worst[k].relative) else worst[k] for k, d in found.items()
        }
    if dist.get_rank() != 0:
        return None
    return VerifyReport(
        steps=steps,
        num_ranks=engine.plan.world_size,
        tolerance=tolerance,
        losses=tuple(losses),
        reference_losses=tuple(reference_losses),
        notes=notes,
        **worst,
    )


def _shared_batch(source: ModelSource, engine: Engine, step: int) -> Any:
    """Rank 0's batch for a step, in fp64, on every rank."""
    payload: list[Any] = [None]
    if dist.get_rank() == 0:
        torch.manual_seed(1000 + step)
        with torch.device("cpu"):
            batch = source.batch(engine.plan.global_batch)
        leaves, tree = flatten_batch(batch)
        promoted = {path: t.double() if t.is_floating_point() else t for path, t in leaves.items()}
        payload = [unflatten_batch(tree, promoted)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(payload, src=0, group=engine.mesh.control)
    return payload[0]


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any], step: int) -> Difference:
    """The largest relative difference over all tensors of `expected`.

    A tensor is compared relative to its own largest entry. Where that is no more than the
    rounding of its terms (the gradient of a bias before BatchNorm, or of a key's bias, whose
    terms cancel), it is compared relative to what makes rounding alone the tolerance. The
    size of its terms is taken from the other tensors of its module, such as the weight.
    """
    as_tensors = {n: torch.as_tensor(v, dtype=torch.float64) for n, v in expected.items()}
    sizes = {n: t.abs().max().item() for n, t in as_tensors.items() if t.numel()}
    terms = _module_sizes(sizes)
    worst = Difference(relative=0.0, name="", step=step)
    for name, size in sizes.items():
        if name not in found:
            return Difference(relative=float("inf"), name=f"{name} (missing)", step=step)
        other = torch.as_tensor(found[name], dtype=torch.float64)
        largest_rounding = _ROUNDING * terms[name]
        scale = max(size, largest_rounding / TOLERANCE, torch.finfo(torch.float64).tiny)
        gap = (other - as_tensors[name]).abs().max().item() / scale
        if not (gap <= worst.relative):
            worst = Difference(relative=gap, name=name, step=step)
    return worst


def _module_sizes(sizes: Mapping[str, float]) -> dict[str, float]:
    """For each tensor, the largest size in the innermost module that holds another one.

    A module whose gradients are all no more than the rounding of its parent's is none to
    measure by: nothing but rounding reaches it (queries and keys that attend to one position).
    """
    members: dict[str, list[float]] = {}
    for name, size in sizes.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            members.setdefault(".".join(parts[:depth]), []).append(size)
    most = {module: max(held) for module, held in members.items()}

    def largest(name: str) -> float:
        module = name.rpartition(".")[0]
        while module:
            parent = module.rpartition(".")[0]
            if len(members[module]) > 1 and most[module] > _ROUNDING * most[parent]:
                break
            module = parent
        return most[module]

    return {name: largest(name) for name in sizes}
