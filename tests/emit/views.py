"""Plans of well-known models that emitters' tests share, and the files they are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from costmodel.table.rows.row_plan import plan_of, transformer_of
from costmodel.table.rows.run_row import parse_row
from planner.emit import Launch, PlanView
from planner.language.templates import build_transformer

GOLDEN = Path(__file__).parent / "golden"

LLAMA = {
    "stack": "megatron-core", "gpu": "H100", "model": "llama-3-8b", "seq_len": "8192",
    "gpus": "16", "tp": "2", "pp": "4", "dp": "2", "vpp": "2", "global_batch": "64",
    "micro_batch": "1", "zero_stage": "1",
}  # fmt: skip


def view_of(launch: Launch | None = None, accepted: tuple[str, ...] = (), **cells: Any) -> PlanView:
    """Return a plan of Llama 3 8B; `cells` change the row of numbers that describes it."""
    run = parse_row(LLAMA | {name: str(value) for name, value in cells.items()})
    model = transformer_of(run)
    return PlanView(
        plan=plan_of(run, model, devices_per_node=8),
        graph=build_transformer(model),
        launch=launch or Launch(),
        accepted=accepted,
    )


def changed(view: PlanView, **fields: Any) -> PlanView:
    """Return a view of the plan with some fields changed."""
    return PlanView(
        plan=view.plan.model_copy(update=fields),
        graph=view.graph,
        launch=view.launch,
        accepted=view.accepted,
    )


def attending(view: PlanView, inputs: str) -> PlanView:
    """Return a view of the plan with queries, keys and values of attention placed so on cp."""
    layouts = []
    for layout in view.plan.layouts:
        ops = tuple(
            (name, f"{inputs}->{text.partition('->')[2]}")
            if layout.axis == "cp" and name.startswith("scaled_dot_product_attention")
            else (name, text)
            for name, text in layout.ops
        )
        layouts.append(layout.model_copy(update={"ops": ops}))
    return changed(view, layouts=tuple(layouts))


def assert_golden(files: dict[str, str], folder: str) -> None:
    """Hold emitted files to those in ``golden/FOLDER``."""
    found = (GOLDEN / folder).iterdir()
    expected = {path.name.removesuffix(".golden"): path.read_text() for path in found}
    assert dict(files) == expected
