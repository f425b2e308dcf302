"""Flags that no price is told for, since it would be wrong: each is refused by name, in a line.

Options that are refused whatever they say are in `megatron_flags.refused`; here are values of
others, and what follows from several together.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import PurePath

from planner.emit.megatron_flags import OPTIONS
from planner.emit.megatron_rules import Run

OTHER_SCRIPTS = {
    "pretrain_hybrid.py": "layers of other kinds are not priced",
    "pretrain_mamba.py": "layers of other kinds are not priced",
    "pretrain_vlm.py": "parts that see images are not priced",
    "train_rl.py": "inference between steps is not priced",
}
"""Megatron-LM's scripts of other models, by why they are refused."""

RECOMPUTED = (
    "core_attn", "layernorm", "mla_up_proj", "moe_act", "shared_experts", "mlp", "moe",
)  # fmt: skip
"""Modules whose recomputation is priced."""

DEVICES_OF_A_NODE = 8
"""Devices up to which the order of ranks is of no part: all links are alike."""


def refusals(run: Run) -> list[str]:
    """Return what of a run is not priced, in a line each."""
    found = [f"--{name}: {why}" for name, why in _named(run)]
    for rule in RULES:
        found += rule(run)
    return list(dict.fromkeys(found))


def _named(run: Run) -> Iterator[tuple[str, str]]:
    for name, value in run.flags.values.items():
        option = OPTIONS[name]
        if option.part == "refused" and str(value) not in option.harmless:
            yield name, option.why


def _script(run: Run) -> Iterator[str]:
    name = PurePath(run.flags.script).name
    if name in OTHER_SCRIPTS:
        yield f"{name}: {OTHER_SCRIPTS[name]}"


def _dtype(run: Run) -> Iterator[str]:
    if not run.has("bf16") and not run.has("fp16"):
        yield "without --bf16 or --fp16 Megatron-LM trains in fp32, which is not priced; give one"
    for name in ("fp8-recipe", "fp4-recipe"):
        if run.word(name) == "custom":
            yield f"--{name} custom: a recipe of your own is not priced"


def _attention(run: Run) -> Iterator[str]:
    if run.has("multi-latent-attention"):
        width, value_width = run.number("qk-head-dim", 128), run.number("v-head-dim", 128)
        if width != value_width:
            yield (
                f"--v-head-dim {value_width} with --qk-head-dim {width}: latent attention is "
                "priced with values as wide as keys"
            )
        if not is_rotary(run):
            yield (
                "--multi-latent-attention: priced with --position-embedding-type rope alone, as "
                "else a table of positions is added"
            )
    kind = run.word("position-embedding-type")
    if kind in ("relative", "mrope"):
        yield f"--position-embedding-type {kind}: it is not priced"
    if run.word("transformer-impl") == "inference_optimized":
        yield "--transformer-impl inference_optimized: it is not priced"
    if run.cp > 1 and is_unfused(run):
        yield "attention that is not fused is not priced with --context-parallel-size above 1"
    kinds = set(run.word("cp-comm-type").split())
    if run.cp > 1 and (len(kinds) > 1 or kinds & {"a2a", "a2a+p2p"}):
        yield (
            f"--cp-comm-type {' '.join(sorted(kinds))}: keys and values are priced as sent by p2p "
            "or all_gather"
        )


def _encoder(run: Run) -> Iterator[str]:
    if not run.is_t5:
        return
    for name in ("pipeline-model-parallel-size", "context-parallel-size"):
        if run.flags.number(name) > 1:
            yield f"--{name} {run.flags.number(name)}: an encoder beside a decoder is priced with 1"
    if run.has_experts:
        yield "--num-experts: an encoder beside a decoder is priced without experts"
    if is_rotary(run) or run.has("multi-latent-attention"):
        yield "an encoder beside a decoder is priced with learned positions and ordinary attention"
    if run.word("recompute-granularity"):
        yield "--recompute-granularity: an encoder beside a decoder is priced without recomputation"


def _experts(run: Run) -> Iterator[str]:
    if not run.has_experts:
        return
    layers = layers_with_experts(run.word("moe-layer-freq") or "1", run.layers)
    if layers is None or sorted(layers) != list(layers):
        yield (
            f"--moe-layer-freq {run.word('moe-layer-freq')}: priced where first layers alone have "
            "no experts, as in ([0]*3+[1]*58)"
        )
    factor = run.flags.values.get("moe-expert-capacity-factor")
    if isinstance(factor, float) and factor > 0 and factor != 1.0:
        yield (
            f"--moe-expert-capacity-factor {factor:g}: priced with all rows, or with 1, an even "
            "number for each expert"
        )
    if run.cuts_some and (run.tp % run.etp or run.number("num-experts") % (run.ep * run.etp)):
        yield (
            f"--expert-tensor-parallel-size {run.etp}: priced where it is 1 or "
            f"--tensor-model-parallel-size {run.tp}, or divides that, and it times "
            f"--expert-model-parallel-size {run.ep} the experts"
        )


def _recompute(run: Run) -> Iterator[str]:
    if run.word("recompute-method") == "uniform" and run.number("recompute-num-layers") > 1:
        yield (
            f"--recompute-num-layers {run.number('recompute-num-layers')} with "
            "--recompute-method uniform: chunks of several layers are not priced; give 1"
        )
    modules = run.word("recompute-modules").split()
    if run.word("recompute-granularity") == "selective":
        for name in modules:
            if name not in RECOMPUTED:
                yield f"--recompute-modules {name}: priced are {', '.join(RECOMPUTED)}"


def _optimizer(run: Run) -> Iterator[str]:
    if run.has("use-precision-aware-optimizer") and run.has("use-megatron-fsdp"):
        yield (
            "--use-precision-aware-optimizer with --use-megatron-fsdp: the state of "
            "Megatron-FSDP's optimizer is priced in fp32 alone"
        )


def _ranks(run: Run) -> Iterator[str]:
    is_over_nodes = run.num_devices > DEVICES_OF_A_NODE
    if run.has("use-tp-pp-dp-mapping") and is_over_nodes and run.pp > 1 and run.dp * run.cp > 1:
        yield (
            "--use-tp-pp-dp-mapping: over nodes ranks are priced with data parallelism inside "
            "pipelines"
        )


RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    _script,
    _dtype,
    _attention,
    _encoder,
    _experts,
    _recompute,
    _optimizer,
    _ranks,
)
"""What is refused beside options themselves, in the order in which it is told."""


def is_rotary(run: Run) -> bool:
    """Whether positions turn heads of queries and keys, as the line says."""
    kind = run.word("position-embedding-type")
    return run.has("use-rotary-position-embeddings") or kind in ("rope", "yarn")


def is_unfused(run: Run) -> bool:
    """Whether attention writes its scores out."""
    backend = run.word("attention-backend")
    if run.has("use-flash-attn") or backend in ("flash", "fused"):
        return False
    return backend in ("unfused", "local") or run.word("transformer-impl") == "local"


def layers_with_experts(text: str, layers: int) -> tuple[bool, ...] | None:
    """Return which layers have experts by ``--moe-layer-freq``: every N-th, or as a list says.

    None where it is neither, or is not of so many layers.
    """
    if text.isdecimal() and int(text):
        return tuple(index % int(text) == 0 for index in range(layers))
    try:
        pattern = _listed(ast.parse(text, mode="eval").body, most=layers)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return tuple(map(bool, pattern)) if len(pattern) == layers else None


def _listed(node: ast.expr, *, most: int) -> list[int]:
    """Return the list that an expression of lists of 0 and 1, ``+`` and ``*`` is."""
    if isinstance(node, ast.List):
        found = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        ones = [value for value in found if isinstance(value, int) and value in (0, 1)]
        if len(ones) != len(node.elts):
            raise ValueError(ast.unparse(node))
        return ones
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _listed(node.left, most=most) + _listed(node.right, most=most)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = node.right
        if isinstance(times, ast.Constant) and isinstance(times.value, int):
            # What is written out must fit in memory.
            return _listed(node.left, most=most) * min(times.value, most + 1)
    raise ValueError(ast.unparse(node))
