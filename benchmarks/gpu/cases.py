"""Models and plans whose steps are predicted and measured: of whole steps on one GPU.

What they take is predicted here too: by the shipped profile before a run (`expect`, which
`benchmarks.gpu.pack` calls), by the measured one after it. No solver is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = Path(__file__).with_name("decoder.py")

LLAMA_1B = {
    "width": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocabulary": 32768,
}
LLAMA_8B = LLAMA_1B | {"width": 4096, "layers": 3, "ffn": 14336}
MIXTRAL = LLAMA_1B | {"layers": 2, "ffn": 7168, "experts": 8}
TINY = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "vocabulary": 512}

SHIPPED = "h100-sxm5-80gb"


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A model under a plan of one rank."""

    name: str
    sizes: Mapping[str, int]
    sequence: int
    microbatch_size: int = 1
    num_microbatches: int = 2
    recompute: str = "none"
    activations_on_host: bool = False
    optimizer_on_host: bool = False
    kernels: str = "eager"
    """How blocks run."""

    @property
    def arguments(self) -> dict[str, int]:
        """What the model is made with."""
        return {**self.sizes, "sequence": self.sequence}


def step_cases(*, tiny: bool) -> tuple[StepCase, ...]:
    """Return what is trained, what tells most first."""
    if tiny:
        on_host = StepCase(name="tiny host", sizes=TINY, sequence=32, optimizer_on_host=True)
        return (
            StepCase(name="tiny", sizes=TINY, sequence=32),
            StepCase(name="tiny full recompute", sizes=TINY, sequence=32, recompute="full"),
            on_host,
            StepCase(name="tiny experts", sizes=TINY | {"layers": 1, "experts": 4}, sequence=32),
        )
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        " compiled": {"kernels": "compiled"},
        " full recompute": {"recompute": "full"},
        " selective recompute": {"recompute": "selective"},
        " activations on host": {"activations_on_host": True},
        " optimizer on host": {"optimizer_on_host": True},
    }
    return (
        StepCase(name="llama 8B width", sizes=LLAMA_8B, sequence=4096),
        *(
            StepCase(name=f"llama 1B{name}", sizes=LLAMA_1B, sequence=4096, **kind)
            for name, kind in kinds.items()
        ),
        StepCase(name="llama 8B width compiled", sizes=LLAMA_8B, sequence=4096, kernels="compiled"),
        StepCase(name="mixtral block", sizes=MIXTRAL, sequence=4096),
        # Of few tokens, where the device waits for the host.
        *(
            StepCase(
                name=f"llama 1B short {kernels}", sizes=LLAMA_1B, sequence=256, kernels=kernels
            )
            for kernels in ("compiled", "graphs")
        ),
    )


def graph_of(case: StepCase) -> Any:
    """Return the case's model, captured in bfloat16 now or kept from before."""
    from planner.capture.source.capture_cache import load_graph

    return load_graph(MODEL, precision="bf16", length=case.sequence, arguments=dict(case.arguments))


def plan_of(case: StepCase, graph: Any) -> Any:
    """Return the case's plan."""
    from planner.language.lowering.defaults import default_plan
    from planner.language.plan import RUNTIME_OF, Plan

    plan = default_plan(
        graph,
        microbatch_size=case.microbatch_size,
        num_microbatches=case.num_microbatches,
        recompute=case.recompute,  # type: ignore[arg-type]
    )
    changes: dict[str, Any] = {"precision": "bf16", "optimizer_on_host": case.optimizer_on_host}
    if case.kernels != "eager":
        changes |= {"kernels": case.kernels, "execution": RUNTIME_OF[case.kernels]}  # type: ignore[index]
    if case.activations_on_host:
        away = {"activations_on_host": True}
        changes["stages"] = tuple(stage.model_copy(update=away) for stage in plan.stages)
    return Plan.model_validate(plan.model_copy(update=changes).model_dump())


def predicted(plan: Any, graph: Any, profile: Any) -> dict[str, float]:
    """Return what a step of the plan is said to take, under a profile."""
    from costmodel import estimate

    found = estimate(graph, profile, plan)
    return {
        "step_s": found.step_s,
        "tensor_bytes": float(max(parts.tensor_bytes for parts in found.memory)),
        "peak_bytes": float(found.peak_bytes),
        "flop": float(found.flop),
    }


def expect(folder: Path, *, tiny: bool = False, profile_name: str = SHIPPED) -> None:
    """Write each case's plan, and what a profile predicts of all, to a folder."""
    from planner.language.plan import save_plan
    from profiles import load_profile

    folder.mkdir(parents=True, exist_ok=True)
    profile = load_profile(profile_name)
    found = {}
    for case in step_cases(tiny=tiny):
        graph = graph_of(case)
        plan = plan_of(case, graph)
        save_plan(plan, plan_file(folder, case))
        found[case.name] = predicted(plan, graph, profile)
    text = json.dumps({"profile": profile_name, "cases": found}, indent=1)
    (folder / "expected.json").write_text(text + "\n")


def plan_file(folder: Path, case: StepCase) -> Path:
    """Return where a case's plan is."""
    return folder / f"{case.name.replace(' ', '-')}.json"


def expected(folder: Path | None) -> dict[str, dict[str, float]]:
    """Return the predictions of a folder by case; nothing without one."""
    if folder is None or not (folder / "expected.json").exists():
        return {}
    return dict(json.loads((folder / "expected.json").read_text())["cases"])
