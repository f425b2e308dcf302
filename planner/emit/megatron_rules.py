"""Rules that Megatron-LM holds its flags to, so that a line can be judged before it takes GPUs.

Each rule is a function from a `Run` to what it breaks; all are told, not the first alone. They are
those of `validate_args` and of the configurations that it makes: NVIDIA/Megatron-LM at
d98e8a64ddf3 (2026-08-22), megatron/training/arguments.py, core/transformer/transformer_config.py,
core/parallel_state.py (what must divide what), core/pipeline_parallel/schedules.py (groups).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from planner.emit.megatron_options import Flags, stages_of_layout
from planner.errors import PlannerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A line of flags, the devices it is for, and sizes of the model that it does not state."""

    flags: Flags
    """The line."""
    num_devices: int
    """Devices of the run."""
    model: Mapping[str, int]
    """Sizes by option, of a model named beside the line."""

    def number(self, name: str, default: int = 0) -> int:
        """Return an option's number, else the model's, else the default."""
        return self.flags.number(name, self.model.get(name, default))

    def word(self, name: str) -> str:
        """Return an option's value as it is written, empty where it is not given."""
        return str(self.flags.values.get(name, ""))

    def has(self, name: str) -> bool:
        """Whether an option is given."""
        return name in self.flags.values

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.flags.number("tensor-model-parallel-size")

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.flags.number("pipeline-model-parallel-size")

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return self.flags.number("context-parallel-size")

    @property
    def ep(self) -> int:
        """Ranks that share the experts."""
        return self.flags.number("expert-model-parallel-size")

    @property
    def etp(self) -> int:
        """Ranks that share an expert's matrices."""
        return self.flags.number("expert-tensor-parallel-size", self.tp)

    @property
    def cuts_some(self) -> bool:
        """Whether some of the tp ranks, and not all of them, share an expert's matrices."""
        return self.etp not in (1, self.tp)

    @property
    def has_experts(self) -> bool:
        """Whether feed-forwards are of experts."""
        return self.number("num-experts") > 0

    @property
    def dp(self) -> int:
        """Replicas, 0 where the devices do not divide."""
        ranks, left = divmod(self.num_devices, self.tp * self.pp * self.cp)
        return 0 if left else ranks

    @property
    def is_bert(self) -> bool:
        """Whether the model is BERT."""
        return self.flags.script.endswith("pretrain_bert.py") or self.has("bert-no-binary-head")

    @property
    def is_t5(self) -> bool:
        """Whether an encoder stands beside the decoder, whose sizes are then those told here."""
        return self.flags.script.endswith("pretrain_t5.py") or self.has("decoder-seq-length")

    @property
    def layers(self) -> int:
        """Layers, those that predict ahead apart; 0 where nothing says."""
        own = self.number("decoder-num-layers") if self.is_t5 else 0
        return own or self.number("num-layers") or self.number("encoder-num-layers")

    @property
    def split_layers(self) -> int:
        """Layers that the pipeline divides; the embedding and the loss may count as one each."""
        ends = self.has("account-for-embedding-in-pipeline-split")
        return self.layers + ends + self.has("account-for-loss-in-pipeline-split")

    @property
    def seq_len(self) -> int:
        """Tokens of a sample; 0 where nothing says."""
        own = self.number("decoder-seq-length") if self.is_t5 else 0
        return own or self.number("seq-length") or self.number("encoder-seq-length")

    @property
    def query_groups(self) -> int:
        """Heads of keys and values; 0 where nothing says, so that they are as many as heads.

        Without ``--group-query-attention`` Megatron-LM reads no number of groups; with it they are
        1 where none is given.
        """
        if self.has("group-query-attention"):
            return self.number("num-query-groups", 1)
        return self.model.get("num-query-groups", 0)

    @property
    def sequence_parallel(self) -> bool:
        """Whether tp ranks split sequences; Megatron-LM switches that off without tp."""
        return self.has("sequence-parallel") and self.tp > 1

    @property
    def vpp(self) -> int:
        """Virtual stages of a pipeline rank, 0 where the layers do not divide."""
        layout = self.flags.values.get("pipeline-model-parallel-layout")
        if isinstance(layout, str):
            stages, left = divmod(len(stages_of_layout(layout)), self.pp)
            return 0 if left else stages
        if self.has("num-virtual-stages-per-pipeline-rank"):
            return self.number("num-virtual-stages-per-pipeline-rank")
        if self.has("num-layers-per-virtual-pipeline-stage"):
            of_stage = self.number("num-layers-per-virtual-pipeline-stage") * self.pp
            return 0 if self.split_layers % of_stage else self.split_layers // of_stage
        return 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step, 0 where the batch does not divide."""
        samples = self.number("micro-batch-size") * self.dp
        batch = self.number("global-batch-size", samples)
        return 0 if not samples or batch % samples else batch // samples


def broken_rules(run: Run) -> list[str]:
    """Return every rule that a run breaks, in a line each."""
    found = list(run.flags.broken)
    for rule in RULES:
        try:
            found += rule(run)
        except PlannerError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _divisors(number: int) -> str:
    fitting = [n for n in range(1, min(number, 4096) + 1) if number % n == 0]
    if len(fitting) > 10:
        fitting = [n for n in fitting if n & (n - 1) == 0][:10]
    return ", ".join(map(str, fitting))


def _devices(run: Run) -> Iterator[str]:
    ranks = run.tp * run.pp * run.cp
    if run.num_devices % ranks:
        yield (
            f"tensor {run.tp} * pipeline {run.pp} * context {run.cp} = {ranks} ranks do not divide "
            f"the {run.num_devices} devices"
        )


def _heads(run: Run) -> Iterator[str]:
    heads, groups = run.number("num-attention-heads"), run.query_groups
    hidden = run.number("hidden-size")
    if heads % run.tp:
        yield (
            f"--tensor-model-parallel-size {run.tp} does not divide --num-attention-heads {heads}; "
            f"use {_divisors(heads)}"
        )
    if groups and groups % run.tp and run.tp % groups:
        yield (
            f"--num-query-groups {groups} is no multiple and no divisor of "
            f"--tensor-model-parallel-size {run.tp}"
        )
    if groups and run.has("multi-latent-attention") and run.has("group-query-attention"):
        yield "--group-query-attention and --multi-latent-attention were given; give one of them"
    if groups and heads % groups:
        yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}"
    takes_width = run.has("kv-channels") or run.has("multi-latent-attention")
    if hidden and heads and hidden % heads and not takes_width:
        yield (
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; give "
            "--kv-channels, the width of a head"
        )


def _widths(run: Run) -> Iterator[str]:
    for name in ("ffn-hidden-size", "moe-ffn-hidden-size"):
        parts = run.etp if name.startswith("moe") else run.tp
        if run.number(name) % parts:
            yield f"{parts} tensor-parallel ranks do not divide --{name} {run.number(name)}"


VIRTUAL = (
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "pipeline-model-parallel-layout",
)
"""Options that tell the virtual stages, of which one at most may be given."""


def _virtual_stages(run: Run) -> Iterator[str]:
    given = [name for name in VIRTUAL if run.has(name)]
    if len(given) > 1:
        yield " and ".join(f"--{name}" for name in given) + " were given; give one of them"
    if run.vpp < 2:
        return
    if run.pp < 2:
        yield f"{run.vpp} virtual stages a rank need --pipeline-model-parallel-size 2 or more"
    elif run.pp == 2 and run.has("no-overlap-p2p-communication"):
        yield (
            "--no-overlap-p2p-communication and virtual stages need --pipeline-model-parallel-size "
            "3 or more: two ranks would send each other two messages at once"
        )
    microbatches = run.num_microbatches
    group = run.number("microbatch-group-size-per-virtual-pipeline-stage")
    name = "--microbatch-group-size-per-virtual-pipeline-stage"
    if group and microbatches and not run.pp <= group <= microbatches:
        yield (
            f"{name} {group} is not from --pipeline-model-parallel-size {run.pp} to the "
            f"{microbatches} microbatches of a step"
        )
    elif group and 0 < microbatches % group < run.pp:
        yield (
            f"{name} {group} leaves a last group of {microbatches % group} of {microbatches} "
            f"microbatches, fewer than --pipeline-model-parallel-size {run.pp}"
        )
    elif microbatches and microbatches < run.pp:
        yield (
            f"{microbatches} microbatches with virtual stages are fewer than "
            f"--pipeline-model-parallel-size {run.pp}"
        )
    elif microbatches % run.pp and not group:
        yield (
            f"{microbatches} microbatches with virtual stages are no multiple of "
            f"--pipeline-model-parallel-size {run.pp}; give {name}"
        )


def _layers(run: Run) -> Iterator[str]:
    if run.has("pipeline-model-parallel-layout") or not run.layers:
        return
    first = run.number("decoder-first-pipeline-num-layers")
    last = run.number("decoder-last-pipeline-num-layers")
    ranks = run.pp - bool(first) - bool(last)
    layers = run.split_layers - first - last
    if ranks < 0 or layers < 0 or (not ranks and layers):
        yield f"{run.split_layers} layers are not {first} on the first and {last} on the last rank"
        return
    if ranks and layers % ranks:
        yield (
            f"{layers} layers are not divisible by {ranks} pipeline ranks; use "
            f"{_divisors(layers)}, or --pipeline-model-parallel-layout for uneven stages"
        )
        return
    of_rank = layers // ranks if ranks else layers
    each = run.number("num-layers-per-virtual-pipeline-stage")
    if each and (first or last):
        yield (
            "--num-layers-per-virtual-pipeline-stage takes even stages alone; give "
            "--num-virtual-stages-per-pipeline-rank with "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    elif each and of_rank % each:
        yield (
            f"{of_rank} layers of a pipeline rank are not divisible by "
            f"--num-layers-per-virtual-pipeline-stage {each}; use {_divisors(of_rank)}"
        )
    stages = run.number("num-virtual-stages-per-pipeline-rank")
    for where, count in (("a", of_rank), ("the first", first), ("the last", last)):
        if stages and count % stages:
            yield (
                f"{count} layers of {where} pipeline rank are not divisible by "
                f"--num-virtual-stages-per-pipeline-rank {stages}; use {_divisors(count)}"
            )


def _layout(run: Run) -> Iterator[str]:
    text = run.flags.values.get("pipeline-model-parallel-layout")
    if not isinstance(text, str):
        return
    stages = stages_of_layout(text)
    if len(stages) % run.pp:
        yield (
            f"--pipeline-model-parallel-layout has {len(stages)} stages, which "
            f"--pipeline-model-parallel-size {run.pp} does not divide"
        )
    for letter, what, place in (("E", "embedding", 0), ("L", "loss", -1)):
        letters = "".join(stages)
        if letters.count(letter) != 1 or letters[place] != letter:
            where = "first" if place == 0 else "last"
            yield (
                f"--pipeline-model-parallel-layout needs the {what} ({letter}) once, as the {where}"
            )
    told = (("t", "layers", "num-layers", run.layers),) if run.layers else ()
    ahead = (("m", "layers that predict ahead", "mtp-num-layers", run.number("mtp-num-layers")),)
    for letter, what, name, number in (*told, *ahead):
        count = "".join(stages).count(letter)
        if count != number:
            yield (
                f"--pipeline-model-parallel-layout has {count} {what} ({letter}) and --{name} is "
                f"{number}"
            )


def _batch(run: Run) -> Iterator[str]:
    micro = run.number("micro-batch-size")
    if not micro:
        yield "--micro-batch-size is not given; Megatron-LM needs it"
        return
    batch, samples = run.number("global-batch-size"), micro * run.dp
    if batch and samples and batch % samples:
        yield (
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} times "
            f"{run.dp} data-parallel ranks = {samples}"
        )


def _experts(run: Run) -> Iterator[str]:
    experts, topk = run.number("num-experts"), run.number("moe-router-topk")
    if run.ep > 1 and not experts:
        yield f"--expert-model-parallel-size {run.ep} needs --num-experts"
    elif experts % run.ep:
        yield (
            f"--expert-model-parallel-size {run.ep} does not divide --num-experts {experts}; use "
            f"{_divisors(experts)}"
        )
    if experts and topk > experts:
        yield f"--moe-router-topk {topk} is more than --num-experts {experts}"
    ranks = run.ep * run.etp * run.pp
    if experts and run.num_devices % ranks:
        yield (
            f"expert {run.ep} * expert tensor {run.etp} * pipeline {run.pp} = {ranks} ranks do not "
            f"divide the {run.num_devices} devices"
        )
    if experts and run.tp > 1 and not run.sequence_parallel:
        yield (
            f"experts with --tensor-model-parallel-size {run.tp} need --sequence-parallel to train"
        )


def _sequences(run: Run) -> Iterator[str]:
    length, positions = run.seq_len, run.number("max-position-embeddings")
    if run.cp > 1 and length % (2 * run.cp):
        yield (
            f"--seq-length {length} is not divisible by 2 * --context-parallel-size {run.cp} = "
            f"{2 * run.cp}"
        )
    elif run.sequence_parallel and (length // run.cp) % run.tp:
        yield (
            f"--seq-length {length} over {run.cp} context-parallel ranks is not divisible by "
            f"--tensor-model-parallel-size {run.tp}, which --sequence-parallel splits it over"
        )
    if positions and length > positions:
        yield f"--seq-length {length} is more than --max-position-embeddings {positions}"


OPTIMIZER_DTYPES = ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
"""Options that a precision-aware optimizer alone takes values of but fp32."""

NEEDS = (
    ("overlap-param-gather", ("use-distributed-optimizer", "use-megatron-fsdp")),
    ("overlap-param-gather", ("overlap-grad-reduce",)),
    ("tp-comm-overlap", ("sequence-parallel",)),
    ("optimizer-cpu-offload", ("use-precision-aware-optimizer",)),
    ("use-precision-aware-optimizer", ("use-distributed-optimizer", "use-megatron-fsdp")),
    ("recompute-method", ("recompute-granularity",)),
)
"""Options that need one of others."""


def _together(run: Run) -> Iterator[str]:
    for name, others in NEEDS:
        if run.has(name) and not any(run.has(other) for other in others):
            yield f"--{name} needs {' or '.join(f'--{other}' for other in others)}"
    narrow = [name for name in OPTIMIZER_DTYPES if run.word(name) not in ("", "fp32")]
    if not run.has("use-precision-aware-optimizer"):
        for name in narrow:
            yield f"--{name} {run.word(name)} needs --use-precision-aware-optimizer"
    if "main-grads-dtype" in narrow and run.has("accumulate-allreduce-grads-in-fp32"):
        yield (
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 were given; give one "
            "of them"
        )
    if run.has("bf16") and run.has("fp16"):
        yield "--bf16 and --fp16 were given; give one of them"
    if run.has("cross-entropy-loss-fusion") and run.word("cross-entropy-fusion-impl") == "te":
        yield (
            "--cross-entropy-fusion-impl te is switched off in Megatron-LM; give native, or leave "
            "--cross-entropy-loss-fusion out"
        )
    fsdp = run.has("use-megatron-fsdp")
    if fsdp and run.flags.values.get("ckpt-format") != "fsdp_dtensor":
        yield "--use-megatron-fsdp needs --ckpt-format fsdp_dtensor"


def _recompute(run: Run) -> Iterator[str]:
    granularity = run.flags.values.get("recompute-granularity")
    if granularity == "full" and not run.has("recompute-method"):
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if granularity == "full" and not run.has("recompute-num-layers"):
        yield "--recompute-granularity full needs --recompute-num-layers"
    if granularity == "selective" and run.has("recompute-method"):
        yield "--recompute-method is of --recompute-granularity full; leave it out for selective"


def _model(run: Run) -> Iterator[str]:
    for name, size in run.model.items():
        given = run.flags.number(name, size)
        if name == "num-query-groups" and not run.has("group-query-attention"):
            continue  # without which no number of groups is read
        if size and given != size:
            yield f"--{name} {given} was given and the model has {size}"


RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    _model,
    _devices,
    _heads,
    _widths,
    _layers,
    _layout,
    _virtual_stages,
    _batch,
    _experts,
    _sequences,
    _together,
    _recompute,
)
"""All rules, in the order in which they are told."""
