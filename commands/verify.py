"""`planner verify`: a parallel run against one process, or the plan block by block."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.common.inputs import graph_of_plan
from commands.common.models import GivenModel
from commands.common.options import DeviceOption, JsonOption, PlanFile, spread
from commands.render.console import show_json, show_progress, show_results
from planner.errors import PlannerError

DEFAULT_STEPS = 3
_TRAINS = "train, by your script that calls planner.apply"


@spread(GivenModel)
def verify(
    plan: PlanFile,
    given: GivenModel,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Optimizer steps to compare; {DEFAULT_STEPS} if not given."),
    ] = None,
    device: DeviceOption = None,
    by_block: Annotated[
        bool,
        typer.Option(
            "--by-block",
            help="Prove each block, the wiring and the tables, for a plan too large to run here.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Prove that a plan computes what one process does.

    Trains a few steps both ways in fp64 and exits with 1 if they differ by more than rounding does.
    With --by-block nothing is trained: all parts of the plan are proven one by one, in this
    process, and what that does not show is said.

    Example: planner verify plan.json model.py
    """
    from commands.render.data import proof_data, verification_data
    from commands.render.tables import NextCommands
    from planner.capture.source.model_file import load_model_file
    from planner.language.across.cut.whole_batch import refuse_cut
    from planner.language.plan import load_plan

    if by_block and (steps is not None or device is not None):
        flag = "--device" if steps is None else "--steps"
        raise PlannerError(
            f"{flag} was given with --by-block, which trains no steps and runs in this process; "
            "leave one of them out"
        )
    if by_block:
        from planner.runtime.process.host.heap import ask_for_large_pages

        ask_for_large_pages()
    loaded = load_plan(plan)
    model = given.file_of(loaded)
    with show_progress("verifying") as progress:
        progress(0.0, "capturing the model")
        graph = graph_of_plan(loaded, model)
        source = load_model_file(model)
        refuse_cut(graph, loaded, weighted_loss=callable(source.loss_weight))
        if by_block:
            from commands.render.checks import describe_proof
            from planner.runtime.proofs.by_block.prove import prove
            from planner.runtime.proofs.users_errors import told_as_users

            with told_as_users(source.path.name, "proving its blocks"):
                proof = prove(loaded, graph, source, progress=progress)
        else:
            from commands.render.checks import describe_verification
            from planner.runtime.proofs.verify import check_memory
            from planner.runtime.proofs.verify import verify as verify_plan

            check_memory(graph, device)

            report = verify_plan(
                plan, model, steps=steps or DEFAULT_STEPS, device=device, progress=progress
            )
    if by_block:
        if as_json:
            show_json(proof_data(proof))
        else:
            show_results(*describe_proof(proof))
        return 0 if proof.passed else 1
    if as_json:
        show_json(verification_data(report))
    else:
        show_results(*describe_verification(report))
        if report.passed and loaded.execution == loaded.runs_as:
            show_results(NextCommands((f"planner launch {plan} train.py", _TRAINS)))
    return 0 if report.passed else 1
