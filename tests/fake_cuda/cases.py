"""What runs on a fake CUDA: plans, options and calls, each as a case for some ranks.

A case is named, so that the test process can ask a process with a fake CUDA for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.language.schedule.registry import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan on a model, and what is done with its engine.

    Attributes:
        model: by its name in `tests.fake_cuda.child`.
        layout: options of `default_plan`.
        plan: fields of the plan that are changed then.
        offload: whether activations of all stages go to the host.
        precision: of the plan.
        options: of `Engine`.
        fused: whether AdamW is fused, so that it passes a wrong step over itself.
        does: by its name in `tests.fake_cuda.child`, after two steps.
        ranks: which are run; -1 is the last.
        quick: those of them that are run among the quick tests.
    """

    model: str = "small-gpt"
    layout: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    offload: bool = False
    precision: Literal["model", "bf16", "fp16"] = "model"
    options: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    does: str = "nothing"
    ranks: tuple[int, ...] = (0, -1)
    quick: tuple[int, ...] = ()


_SMALL = {"pp": 2, "dp": 2, "tp": 2, "num_microbatches": 2}
_TWO = {"pp": 2, "num_microbatches": 2}
_TOWERS = ("users.weight", "items.weight")


def _schedules() -> dict[str, Case]:
    found = {}
    for name, spec in sorted(SCHEDULES.items()):
        vpp = max(spec.min_vpp, 1)
        layout = {"pp": 2, "vpp": vpp, "num_microbatches": 4, "schedule": name}
        quick = (-1,) if name == "zb_v" else ()
        found[name] = Case(model="gpt", layout=layout, precision="bf16", quick=quick)
        if vpp > 1:  # values that skip stages of one rank
            found[f"{name}, skips"] = Case(model="unet", layout=layout)
    split = {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "zb_h1"}
    found["zb_h1, zero 2"] = Case(model="gpt", layout=split | {"zero_stage": 2})
    found["zb_h1, recompute full"] = Case(model="gpt", layout=split | {"recompute": "full"})
    return found


def _layouts() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "one rank": {},
        "pp2 dp2 tp2": _SMALL,
        "dp2 cp2": {"dp": 2, "cp": 2},
        "tp4": {"tp": 4},
    }
    found = {}
    for name, layout in layouts.items():
        for precision in ("model", "bf16"):
            for zero in (0, 1, 2, 3) if layout.get("dp", 1) > 1 else (0,):
                found[f"{name}, zero {zero}, {precision}"] = Case(
                    layout={**layout, "zero_stage": zero},
                    precision=precision,  # type: ignore[arg-type]
                    options={"max_grad_norm": 1.0},
                    fused=precision == "bf16",
                    quick=(0,) if (name, zero, precision) == ("pp2 dp2 tp2", 3, "bf16") else (),
                )
    for zero in (0, 1, 3):
        # The scale of the loss is followed by the look that each step has.
        found[f"pp2 dp2 tp2, zero {zero}, fp16"] = Case(
            layout=_SMALL | {"zero_stage": zero},
            precision="fp16",
            fused=zero > 0,
            quick=(0,) if zero == 1 else (),
        )
    for zero in (1, 2, 3):
        layout = {"rp": 2, "dp": 2, "num_microbatches": 2, "zero_stage": zero}
        found[f"rp2 dp2, zero {zero}"] = Case(layout=layout, options={"max_grad_norm": 1.0})
        found[f"rp2 dp2, zero {zero}, bf16"] = Case(layout=layout, precision="bf16")
    for zero in (0, 2):
        unlike = {
            "pp": 2,
            "tp": 2,
            "microbatch_size": 2,
            "by_stage": {"tp": (2, 1)},
            "zero_stage": zero,
        }
        found[f"tp of each stage, zero {zero}"] = Case(layout=unlike)
    return found


def _kernels() -> dict[str, Case]:
    found = {}
    for kernels in ("compiled", "graphs"):
        layouts = {
            "": {**_TWO, "dp": 2},
            ", tp": _SMALL,
            ", recompute": {**_TWO, "recompute": "full"},
            ", split": {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
        }
        for name, layout in layouts.items():
            found[f"{kernels}{name}"] = Case(
                layout=layout,
                plan={"kernels": kernels},
                precision="bf16",
                quick=(0,) if (kernels, name) == ("graphs", "") else (),
            )
    return found


def _memory() -> dict[str, Case]:
    found = {}
    for recompute in ("full", "selective"):
        for zero in (0, 3):
            found[f"recompute {recompute}, zero {zero}"] = Case(
                layout={"dp": 2, "zero_stage": zero, "recompute": recompute}, ranks=(0,)
            )
    for recompute in ("none", "full", "selective"):
        layout = {"pp": 2, "num_microbatches": 6, "schedule": "fthenb", "recompute": recompute}
        found[f"activations on host, recompute {recompute}"] = Case(
            layout=layout, offload=True, precision="bf16", ranks=(0,)
        )
    for zero in (0, 1, 2, 3):
        for precision in ("model", "bf16"):
            found[f"optimizer on host, zero {zero}, {precision}"] = Case(
                layout={"dp": 2, "zero_stage": zero},
                plan={"optimizer_on_host": True},
                precision=precision,  # type: ignore[arg-type]
                options={"max_grad_norm": 1.0},
                quick=(0,) if (zero, precision) == (0, "bf16") else (),
                ranks=(0,),
            )
    for zero in (0, 3):
        found[f"tables on host, zero {zero}"] = Case(
            model="dense-towers",
            layout={"dp": 2, "zero_stage": zero},
            plan={"tables_on_host": _TOWERS},
            ranks=(0,),
        )
    found["sparse tables on host"] = Case(
        model="sparse-towers", layout={"dp": 2}, plan={"tables_on_host": _TOWERS}, ranks=(0,)
    )
    found["sparse tables"] = Case(model="sparse-towers", layout={"dp": 2}, ranks=(0,))
    return found


def _models() -> dict[str, Case]:
    clip = {"max_grad_norm": 1.0}
    tied = "small-tied-gpt"
    return {
        "tied": Case(model=tied, layout={**_TWO, "dp": 2}, options=clip, quick=(0,)),
        "tied, bf16": Case(model=tied, layout=_TWO, precision="bf16"),
        "tied, zero 3": Case(model=tied, layout={**_TWO, "dp": 2, "zero_stage": 3}, options=clip),
        "tied, unlike meshes": Case(
            model=tied, layout={"pp": 2, "tp": 2, "microbatch_size": 2, "by_stage": {"tp": (2, 1)}}
        ),
        "dropout": Case(model="dropout-gpt", layout={**_SMALL, "recompute": "full"}),
        "dropout, bf16": Case(model="dropout-gpt", layout=_TWO, precision="bf16"),
        "opaque modules": Case(model="experts", layout=_TWO),
        "opaque modules, dp2": Case(model="experts", layout={"dp": 2}, options=clip, ranks=(0,)),
        "opaque modules, zero 2": Case(
            model="experts", layout={"dp": 2, "zero_stage": 2}, ranks=(0,)
        ),
        "batch norm": Case(
            model="batchnorm-mlp", layout={"dp": 2, "microbatch_size": 2}, ranks=(0,)
        ),
        "batch norm, deferred": Case(
            model="batchnorm-mlp",
            layout={"dp": 2, "microbatch_size": 2},
            options={"deferred_batch_norm": True},
            ranks=(0,),
        ),
        "complex parameters": Case(model="complex", layout=_TWO, options=clip),
    }


def _calls() -> dict[str, Case]:
    three = {"dp": 2, "num_microbatches": 2, "zero_stage": 3}
    found = {}
    for does in ("evaluates", "accumulates", "fetches", "averages", "gathers", "loads"):
        found[does] = Case(layout=_TWO, does=does)
        found[f"{does}, zero 3"] = Case(layout=three, does=does, ranks=(0,))
    found["saves"] = Case(
        model="batchnorm-mlp", layout={"dp": 2, "microbatch_size": 2}, does="saves"
    )
    found["loader"] = Case(layout=_TWO, does="trains from a loader")
    found["short batch"] = Case(
        layout={"dp": 2, "num_microbatches": 2, "microbatch_size": 2}, does="trains on less"
    )
    found["prepare"] = Case(layout=_TWO, does="prepare", quick=(-1,))
    found["PlannerTrainer"] = Case(model="hf-llama", layout=_TWO, does="trainer", ranks=(0,))
    return found


CASES: dict[str, Case] = {
    **_schedules(),
    **_layouts(),
    **_memory(),
    **_kernels(),
    **_models(),
    **_calls(),
}
