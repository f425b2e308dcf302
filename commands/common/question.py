"""What `search` and `why` both ask: a field for each option, and the request they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.inputs import parse_precision
from commands.common.models import GivenModel
from commands.common.options import (
    CHOICES,
    CLIP,
    RUNTIMES,
    TRAINING,
    AcceptOption,
    ClusterOption,
    ProfileOption,
)
from commands.doors.said import Said
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.language.graph import ModelGraph
    from planner.language.plan import Precision
    from profiles import Profile
    from search import SearchRequest

AUTO = "auto"
"""The precision that leaves it to the search."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The devices, the batch, the machine, and the choices that are fixed (None: searched)."""

    gpus: Annotated[
        int | None,
        typer.Option(help="Devices to use, all of them. Default: those that a script names."),
    ] = None
    profile: ProfileOption = None
    cluster: ClusterOption = None
    global_batch: Annotated[
        int | None, typer.Option(help="Samples per step. Default: 8 per device.")
    ] = None
    memory_limit: Annotated[
        float | None,
        typer.Option(
            help="GiB per device that the estimate may take. Default: what the profile allows, as "
            "far as it fits with --memory-odds."
        ),
    ] = None
    memory_odds: Annotated[
        float | None,
        typer.Option(
            help="How sure a plan must be to fit, 0.5 (the estimate fits) to 0.99. Default: 0.9, "
            "and 0.5 of a --memory-limit."
        ),
    ] = None
    dp: Annotated[
        int | None, typer.Option(help="Fix the data-parallel degree.", rich_help_panel=CHOICES)
    ] = None
    tp: Annotated[
        int | None, typer.Option(help="Fix the tensor-parallel degree.", rich_help_panel=CHOICES)
    ] = None
    pp: Annotated[
        int | None, typer.Option(help="Fix the number of pipeline ranks.", rich_help_panel=CHOICES)
    ] = None
    vpp: Annotated[
        int | None, typer.Option(help="Fix the stages per pipeline rank.", rich_help_panel=CHOICES)
    ] = None
    cp: Annotated[
        int | None, typer.Option(help="Fix the context-parallel degree.", rich_help_panel=CHOICES)
    ] = None
    hp: Annotated[
        int | None,
        typer.Option(
            help="Fix the ranks of each part of cp that exchange positions for heads.",
            rich_help_panel=CHOICES,
        ),
    ] = None
    rp: Annotated[
        int | None,
        typer.Option(
            help="Fix the copies of ZeRO's shards (HSDP), dp replicas each.",
            rich_help_panel=CHOICES,
        ),
    ] = None
    ep: Annotated[
        int | None,
        typer.Option(
            help="Fix the expert-parallel degree: ranks of a stage that share its experts.",
            rich_help_panel=CHOICES,
        ),
    ] = None
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            help="How uneven experts' rows are: sigma of log rows a rank, 0 if forced to be even. "
            "Default: as recorded runs told.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    microbatch_size: Annotated[
        int | None, typer.Option(help="Fix samples per microbatch.", rich_help_panel=CHOICES)
    ] = None
    schedule: Annotated[
        str | None, typer.Option(help="Fix the pipeline schedule.", rich_help_panel=CHOICES)
    ] = None
    zero: Annotated[
        int | None, typer.Option(help="Fix the ZeRO stage: 0, 1, 2 or 3.", rich_help_panel=CHOICES)
    ] = None
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Fix recompute of all blocks: none, selective or full.", rich_help_panel=CHOICES
        ),
    ] = None
    balance: Annotated[
        str | None,
        typer.Option(help="Fix the blocks of each stage, such as 1,3.", rich_help_panel=CHOICES),
    ] = None
    split_rank: Annotated[
        int | None,
        typer.Option(help="The pipeline rank that the decoder begins at.", rich_help_panel=CHOICES),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help="model: the model's own dtypes; bf16 or fp16: with fp32 master weights, of fp16 a "
            "loss that is scaled; fp8, fp8-tensorwise, mxfp8: bf16 with layers in 8-bit floats; "
            "auto: the fastest of model, bf16, fp8 and mxfp8. Default: as a configuration says, "
            "else model.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    execution: Annotated[
        str | None,
        typer.Option(
            help=f"The runtime that trains: {RUNTIMES} Default: whose script it is, else "
            "ours-eager.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    kernels: Annotated[
        str | None,
        typer.Option(
            help="Of blocks on this runtime: eager, compiled, graphs (compiled, in CUDA graphs), "
            "or auto: eager or compiled, as priced faster. Default: as --execution says; auto "
            "where a profile has compiled blocks.",
            rich_help_panel=CHOICES,
        ),
    ] = None
    receive_ahead: Annotated[
        int,
        typer.Option(
            help="Jobs ahead of which receives are posted: each costs a buffer; 0 hides none.",
            rich_help_panel=TRAINING,
        ),
    ] = 2
    clip_gradients: Annotated[bool | None, CLIP] = None
    overlap: Annotated[
        str,
        typer.Option(
            help="Beside collectives of tp and cp inside blocks: none, or auto: weight gradients "
            "in backwards, products in forwards, where that is priced faster.",
            rich_help_panel=CHOICES,
        ),
    ] = "none"
    logits: Annotated[
        str,
        typer.Option(
            help="Of a loss: whole, chunked (of some tokens at a time, made twice), or auto: what "
            "makes the faster plan.",
            rich_help_panel=CHOICES,
        ),
    ] = "auto"
    offload: Annotated[
        str,
        typer.Option(
            help="On the host: none, optimizer, activations, both, tables; auto: what it takes.",
            rich_help_panel=CHOICES,
        ),
    ] = "auto"
    meshes: Annotated[
        str,
        typer.Option(
            help="same: one dp and tp for all stages; own: each stage's may differ.",
            rich_help_panel=CHOICES,
        ),
    ] = "same"
    accept: AcceptOption = None
    pin: Annotated[
        list[str] | None,
        typer.Option(
            help="Fix where parameters lie, such as 'layers.*.up: S(0)@tp'. Repeatable.",
            rich_help_panel=CHOICES,
        ),
    ] = None

    deepspeed: Annotated[
        Path | None,
        typer.Option(
            help="A DeepSpeed json beside the model: its batch, precision and clipping.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    keep_layout: Annotated[
        bool,
        typer.Option(
            "--keep-layout",
            help="Fix the layout that a script, a toml or --deepspeed has, too.",
            rich_help_panel=CHOICES,
        ),
    ] = False

    def with_model(self, given: GivenModel) -> tuple[Path, Question, tuple[str, ...]]:
        """Return the model file; the question with what the files that were given say where no
        option does; and lines for the user.

        Raises PlannerError, in one line, where a file can't be read or lacks something.
        """
        model, said = given.opened(self.gpus)
        if self.deepspeed is not None:
            from commands.doors.deepspeed import read_deepspeed

            trained, layout, note = read_deepspeed(self.deepspeed, self.gpus)
            said |= Said(trained=trained, layout=layout, notes=(note,))
        if self.keep_layout and not said.layout:
            raise PlannerError(
                f"--keep-layout was given; {given.model} has no layout to keep: leave it out"
            )
        values = {**said.trained, **(said.layout if self.keep_layout else {})}
        usual = type(self)()
        left = {n: v for n, v in values.items() if getattr(self, n) == getattr(usual, n)}
        question = replace(self, **left)
        if question.gpus is None:
            raise PlannerError("--gpus was not given; say how many devices train, such as --gpus 8")
        return model, question, said.notes

    @property
    def executions(self) -> tuple[str, ...]:
        """The runtimes that plans may be for: two where blocks may be compiled or not."""
        from planner.language.plan import OURS, RUNTIME_OF

        if self.kernels is None:
            return (self.execution or OURS,)
        # (CUDA graphs are for those who ask for them: no GPU has shown what they bring.)
        of: dict[str, tuple[str, ...]]
        of = {"auto": (RUNTIME_OF["eager"], RUNTIME_OF["compiled"])}
        of |= {kernels: (name,) for kernels, name in RUNTIME_OF.items()}
        if self.kernels not in of:
            raise PlannerError(f"--kernels {self.kernels} was given; use {', '.join(of)}")
        if self.execution not in (None, *of[self.kernels]):
            raise PlannerError(
                f"--kernels {self.kernels} was given with --execution {self.execution}, and says "
                f"how blocks run on {' or '.join(of[self.kernels])}; drop one of them"
            )
        return of[self.kernels]

    def executions_on(self, profile: Profile) -> tuple[str, ...]:
        """Return the same for a machine: where nothing is said and compiled blocks were measured on
        it, both are compared, as for `auto`.
        """
        if self.kernels is None and self.execution is None and profile.has_compiled_blocks:
            return replace(self, kernels=AUTO).executions
        return self.executions

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that plans may have: several where the fastest is asked for, of a system's
        in 8 bits its own.
        """
        if self.precision == AUTO:
            from planner.language.plan.parts import scaling_named
            from planner.language.stacks import execution_of, stack_of

            stack = stack_of(execution_of(self.executions[0]))
            own = () if stack is None else tuple(filter(scaling_named, stack.precisions))
            return ("model", "bf16", *(own or ("fp8", "mxfp8")))
        return (parse_precision(self.precision or "model", AUTO),)

    def request(self, model: Path, **more: Any) -> SearchRequest:
        """Return the question as the search takes it; `more` are fields of the request. Of several
        `executions` or `precisions` it is about the first.

        Pins are left out: what they name is known with the graph (`pins_in`).
        """
        from search import SearchRequest

        gpus = 1 if self.gpus is None else self.gpus
        return SearchRequest(
            num_devices=gpus,
            global_batch=8 * gpus if self.global_batch is None else self.global_batch,
            memory_limit_bytes=bytes_of_gib(self.memory_limit),
            memory_odds=self.memory_odds,
            model_file=str(model),
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            cp=self.cp,
            hp=self.hp,
            rp=self.rp,
            ep=self.ep,
            expert_imbalance=self.expert_imbalance,
            microbatch_size=self.microbatch_size,
            schedule=self.schedule,
            zero=self.zero,
            recompute=self.recompute,
            balance=parse_counts(
                "--balance",
                self.balance,
                "the number of blocks of each stage, in order, such as 1,3",
            ),
            split_rank=self.split_rank,
            offload=self.offload,  # type: ignore[arg-type]  # the request checks it
            meshes=self.meshes,  # type: ignore[arg-type]  # the request checks it
            overlap=self.overlap,  # type: ignore[arg-type]  # the request checks it
            logits=self.logits,  # type: ignore[arg-type]  # the request checks it
            precision=self.precisions[0],
            execution=self.executions[0],
            receive_ahead=self.receive_ahead,
            clip_gradients=bool(self.clip_gradients),
            accept=tuple(dict.fromkeys(self.accept or ())),
            **more,
        )

    def pins_in(self, graph: ModelGraph) -> tuple[tuple[int, str, str], ...]:
        """Return pins as (class index, parameter name in its program, placement)."""
        from planner.language.layout.pins import class_pins, parse_pin

        by_class = class_pins(graph, [parse_pin(text) for text in self.pin or ()])
        return tuple(
            (index, name, str(placement))
            for index, names in by_class.items()
            for name, placement in names.items()
        )


def parse_choices(flag: str, texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse the values of --allow or --forbid: CHOICE=VALUE or CHOICE=VALUE,VALUE each."""
    pairs = []
    for text in texts:
        choice, equals, values = text.partition("=")
        if not equals or not choice or not all(values.split(",")):
            raise PlannerError(
                f"{flag} {text} is not understood; write CHOICE=VALUE, such as schedule=1f1b, "
                "or several values: tp=2,4"
            )
        pairs += [(choice.replace("-", "_"), value.strip()) for value in values.split(",")]
    return tuple(pairs)


def parse_counts(flag: str, text: str | None, what: str) -> tuple[int, ...]:
    """Parse whole numbers above 0 with commas between them; none of them for no text."""
    if text is None:
        return ()
    counts = text.split(",")
    if not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        raise PlannerError(f"{flag} {text} is not understood; write {what} (whole numbers above 0)")
    return tuple(map(int, counts))


def bytes_of_gib(gib: float | None) -> int | None:
    """Return bytes of GiB per device; None where none is given."""
    from planner.units import GIB

    if gib is None:
        return None
    if not 0 < gib < math.inf:
        raise PlannerError(f"--memory-limit {gib:g} was given; it is GiB per device, above 0")
    return round(gib * GIB)
