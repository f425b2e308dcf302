"""What can be set on the page, with a short text of what each means."""

from __future__ import annotations

from dataclasses import dataclass

from planner.language.plan.accepted import ACCEPTED


@dataclass(frozen=True, kw_only=True)
class Field:
    """A number of the form, or a word out of a list."""

    name: str
    """As requests and rows call it."""
    label: str
    """As people do."""
    meaning: str
    """What it means, in a sentence or two."""
    flag: str = ""
    """The option of `planner search` that sets it; empty: a model file decides it."""
    usual: str = ""
    """The value at first."""
    positions: tuple[float, ...] = ()
    """Where its slider stops; empty: it has none."""
    values: tuple[str, ...] = ()
    """The words it may be; empty: it is a number."""
    is_whole: bool = True
    """Whether the number is a whole one."""
    most: float = 10**9
    """The largest number that is answered."""


def _doubling(first: int, last: int) -> tuple[float, ...]:
    found = [first]
    while found[-1] < last:
        found.append(2 * found[-1])
    return tuple(map(float, found))


SIZES = (
    Field(
        name="layers", label="Layers", usual="32", most=2048,
        meaning="Equal blocks, one after the other. A pipeline deals them out to its ranks.",
    ),
    Field(
        name="hidden", label="Hidden size", usual="4096", most=2**20,
        meaning="Numbers that stand for one token between two layers.",
    ),
    Field(
        name="heads", label="Attention heads", usual="32", most=2**16,
        meaning="Parts of attention that work side by side. Tensor parallel deals them out.",
    ),
    Field(
        name="kv_heads", label="Key-value heads", usual="8", most=2**16,
        meaning="Heads of keys and values; fewer than attention heads where several share one.",
    ),
    Field(
        name="ffn_hidden", label="Feed-forward width", usual="14336", most=2**22,
        meaning="The wide middle of each layer's feed-forward; of one expert where there are some.",
    ),
    Field(
        name="gated_ffn", label="Gated feed-forward", usual="1", values=("1", "0"),
        meaning="1: three matrices, as in Llama (SwiGLU). 0: two, as in GPT-2.",
    ),
    Field(
        name="vocab", label="Vocabulary", usual="128256", most=2**24,
        meaning="Different tokens. The first and the last block hold a row for each.",
    ),
    Field(
        name="num_experts", label="Experts", usual="1", most=2**12,
        meaning="Feed-forwards of a layer of which each token uses a few; 1: an ordinary model.",
    ),
    Field(
        name="experts_per_token", label="Experts a token", usual="", most=2**10,
        meaning="Experts that one token goes through; blank: 2.",
    ),
)  # fmt: skip
"""Sizes of a decoder, columns of the rows of `planner estimate`."""

CLUSTER = (
    Field(
        name="gpus", label="GPUs", flag="--gpus", usual="64", positions=_doubling(1, 16384),
        most=2**17, meaning="All of them are used.",
    ),
    Field(
        name="memory_limit", label="Memory of a GPU (GiB)", flag="--memory-limit",
        is_whole=False, most=4096, positions=tuple(map(float, range(4, 181, 2))),
        meaning="What a plan may fill. Less memory takes more splitting, or computing things twice."
        " Blank: all that the device has.",
    ),
    Field(
        name="link_rate", label="Links between nodes (x today's)", usual="1", is_whole=False,
        most=1000, positions=(0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 10.0),
        meaning="How fast the network between nodes is, against the one of this machine.",
    ),
)  # fmt: skip
"""The machine, beside its kind."""

TRAINING = (
    Field(
        name="global_batch", label="Batch (samples a step)", flag="--global-batch", usual="256",
        positions=_doubling(1, 16384), most=2**24,
        meaning="Samples that one update of the weights is made from, on all GPUs together.",
    ),
    Field(
        name="length", label="Sequence length (tokens)", usual="4096", most=2**24,
        positions=_doubling(256, 1 << 20),
        meaning="Tokens of one sample. Attention's work grows with its square.",
    ),
)  # fmt: skip
"""What a step trains on."""

_DEGREES = ("", "1", "2", "4", "8", "16", "32", "64")

CHOICES = (
    Field(
        name="dp", label="Data parallel", flag="--dp", values=(*_DEGREES, "128", "256"),
        meaning="Copies of the model. Each trains on its own samples; once a step they sum their "
        "gradients.",
    ),
    Field(
        name="tp", label="Tensor parallel", flag="--tp", values=_DEGREES,
        meaning="GPUs that share each matrix. Saves memory, but they exchange results in every "
        "layer: it needs fast links.",
    ),
    Field(
        name="pp", label="Pipeline ranks", flag="--pp", values=_DEGREES,
        meaning="Groups of GPUs that hold consecutive layers. Little traffic, but they idle while "
        "the pipeline fills and drains.",
    ),
    Field(
        name="vpp", label="Stages of a rank", flag="--vpp", values=("", "1", "2", "4", "8"),
        meaning="Virtual pipeline: a rank holds several short stages. The pipeline fills faster, "
        "with more messages.",
    ),
    Field(
        name="cp", label="Context parallel", flag="--cp", values=_DEGREES,
        meaning="GPUs that share one long sequence, each some of its tokens.",
    ),
    Field(
        name="ep", label="Expert parallel", flag="--ep", values=_DEGREES,
        meaning="GPUs of a stage that share its experts: rows go to the experts that a router "
        "picks, and back. It adds no GPUs to those of the other degrees.",
    ),
    Field(
        name="expert_imbalance", label="Imbalance of experts", flag="--expert-imbalance",
        is_whole=False, most=3,
        meaning="How unevenly routers deal tokens to GPUs: sigma of the logarithm of a GPU's rows. "
        "0 where routing is forced to be even, 0.66 in fine-tuning on few kinds of text.",
    ),
    Field(
        name="microbatch_size", label="Samples of a microbatch", flag="--microbatch-size",
        values=("", "1", "2", "4", "8", "16"),
        meaning="A replica's samples are computed so many at a time. Larger ones are faster on the "
        "device, but hold more activations and fill a pipeline worse.",
    ),
    Field(
        name="schedule", label="Schedule", flag="--schedule", values=("",),
        meaning="The order in which a pipeline rank runs forwards and backwards.",
    ),
    Field(
        name="zero", label="ZeRO stage", flag="--zero", values=("", "0", "1", "2", "3"),
        meaning="What data-parallel copies share instead of each holding it: 1 the optimizer, 2 "
        "also gradients, 3 also weights.",
    ),
    Field(
        name="recompute", label="Recomputation", flag="--recompute",
        values=("", "none", "selective", "full"),
        meaning="What the backward needs is computed again instead of kept: less memory, more "
        "work.",
    ),
    Field(
        name="offload", label="On the host", flag="--offload",
        values=("", "none", "tables", "optimizer", "activations", "both"),
        meaning="What waits in the host's memory. Left open, only where nothing else fits.",
    ),
    Field(
        name="precision", label="Precision", flag="--precision",
        values=("", "bf16", "fp16", "fp8", "fp8-tensorwise", "mxfp8", "model"),
        meaning="bf16, fp16: products in 16 bits, weights also kept in fp32; fp16 scales the loss. "
        "fp8, mxfp8: bf16 with layers in 8-bit floats. model: as the model is "
        "written. Not searched: blank is bf16 for sizes, model for a file.",
    ),
    Field(
        name="execution", label="Runtime", flag="--execution", values=("",),
        meaning="The software that trains; others run other kernels and hide other messages. Not "
        "searched: blank is `planner launch`.",
    ),
    Field(
        name="accept", label="Accepted of a cut batch", flag="--accept", values=("", *ACCEPTED),
        meaning="Where a model computes across the samples of a batch, the batch stays whole, as "
        "one process has it. This lets parts of it compute with their own samples.",
    ),
)  # fmt: skip
"""What a search decides, and may be fixed."""

FIELDS = {field.name: field for field in (*SIZES, *CLUSTER, *TRAINING, *CHOICES)}

PRESETS = (
    ("Llama 3 8B", "llama3 8b"),
    ("Llama 2 13B", "llama2 13b"),
    ("Llama 3 70B", "llama3 70b"),
    ("GPT-3 175B", "gpt3 175b"),
    ("Llama 3 405B", "llama3 405b"),
    ("Mixtral 8x7B", "mixtral 8x7b"),
)
"""Models whose sizes fill the form: a label, and what rows call them."""
