"""Which named stack a row ran on: as it says, else as software of its time did."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

from costmodel.execution import Execution, find_execution
from costmodel.execution.dispatch.imbalance import check_imbalance
from costmodel.execution.execution import KeptNarrow, Overlapped, Scaling
from costmodel.table.rows.named_models import named_model
from costmodel.table.rows.row_words import Cells, RowError, gated_of, real, stack_of, zero_of

MEGATRON_CLASSIC = find_execution("megatron-classic")
MEGATRON_DEEPSPEED = find_execution("megatron-deepspeed")
DEEPSPEED_ZERO3 = find_execution("deepspeed-zero3")
MEGATRON_CORE = find_execution("megatron-core")
FSDP_FLASH = find_execution("fsdp-flash")
EAGER_FLASH = find_execution("eager-flash")

OLDER_DEVICES = ("V100", "A100", "A800", "P100", "T4", "MI2")
"""Devices that were trained on before fused attention was usual."""

BLACKWELL = re.compile(r"\bG?B[123]00")
"""Names of devices of that generation."""

HOPPER = re.compile(r"\b(H[128]00|H20|GH200)")
"""Names of devices of the generation before."""

CUT_STREAMS = 3
"""Streams of products that are cut to run beside their collectives, each with a workspace
(Transformer Engine, pytorch/module/base.py: initialize_ub, _NUM_MAX_UB_STREAMS)."""

LONGEST_UNFUSED = 2048
"""Tokens of a sample up to which attention was usually unfused."""

DROPS_ROWS = re.compile(r"(?i)token.?drop")
"""Words for experts that take a fixed number of rows."""

EVEN_ROUTING = re.compile(r"(?i)forced?.balance")
"""Words for routers that are made to give all experts as many rows."""

NATURAL_ROUTING = re.compile(r"(?i)natural(ly)? rout")
"""Words for routers that nothing makes even, as in fine-tuning on few kinds of text."""

NATURAL_IMBALANCE = 0.66
"""Imbalance there: DeepSpeed #8213, fine-tuning on 16 H100, has 3.01 (math) and 2.56 (code) times
the mean on the fullest rank at its last step, which are 0.73 and 0.60."""

CUDA_GRAPHS = re.compile(r"(?i)cuda.?graphs?(?: of (?P<parts>[\w ,]+))?")
"""Words for layers, or parts of them, whose kernels the host starts together, as one graph."""

DISPATCHERS = (
    (re.compile(r"(?i)deep.?ep.?uccl"), "deepep-uccl"),
    (re.compile(r"(?i)deep.?ep.?nvshmem"), "deepep-nvshmem"),
    (re.compile(r"(?i)deep.?ep"), "deepep"),
    (re.compile(r"(?i)hybrid.?ep"), "hybridep"),
    (re.compile(r"(?i)all.?gather"), "allgather"),
    (re.compile(r"(?i)all.?to.?all"), "alltoall"),
)
"""Words for dispatchers of experts' rows (`costmodel.execution.dispatch`)."""

BESIDE_SHARED = re.compile(r"(?i)shared.?experts? (is )?overlap")
"""Words for rows of experts that travel beside the experts that every token goes through."""

OVERLAPS_ROWS = re.compile(r"(?i)(a2a|all.?to.?all|dispatch\w*) (is )?overlap")
"""Words for rows of experts that travel beside another microbatch's compute."""

SERVED_BY_HOSTS = re.compile(r"(?i)\bP5 (nodes|hosts)\b")
"""Words for nodes whose hosts' threads serve many adapters: AWS P5 has four of 100 Gb/s for each
device (EFA)."""

SERVED_LATE_S = find_execution("nanotron").polled_late_s
"""`Execution.polled_late_s` there, of any runtime: what nanotron's runs on H100 tell. Nothing of it
is fitted to rows that name such nodes."""

LEFT_OF_ATTENTION = 10
"""Launches left of a layer whose attention is a graph: the graph, what is beside the router and the
experts, and sums."""

LEFT_OF_ROUTER = 6
"""Launches left of routing where the router is a graph: the graph, dispatch and combine."""

COMPILED = re.compile(r"(?i)(?<!without )(torch\.)?compile")
"""Words for layers that a compiler fuses."""

COMPILED_AS = {"fsdp-flash": "torchtitan-compiled", "torchtitan": "torchtitan-compiled"}
"""What stacks are then."""

SCALINGS: tuple[tuple[str, Scaling], ...] = (
    (r"rowwise_with_gw_hp", "rowwise-forward"),
    (r"row.?wise", "rowwise"),
    (r"mxfp", "blocks"),
)
"""Words of a dtype for recipes of torchao, which scales tensors where none is said."""

FUSED_SINCE = {
    MEGATRON_CLASSIC: MEGATRON_CORE,
    MEGATRON_DEEPSPEED: EAGER_FLASH,
    DEEPSPEED_ZERO3: FSDP_FLASH,
}
"""What a framework's name means once its attention is fused."""


def stack_of_row(cells: Cells) -> Execution:
    """Return a row's stack. A framework's name means what it did at the row's time (`is_modern`);
    ``megatron-classic`` always means unfused attention.
    """
    text = cells.text("stack")
    zero_stage = zero_of(cells.raw("zero_stage"))
    stack = stack_of(text)
    said_classic = text.strip().lower() == MEGATRON_CLASSIC.name
    if stack is None:
        stack = _usual_stack(cells, is_named=bool(text))
        cells.assume("stack", stack.name)
    elif stack in FUSED_SINCE and not said_classic and is_modern(cells):
        stack = FUSED_SINCE[stack]
        if zero_stage == 3 and stack is EAGER_FLASH:
            stack = FSDP_FLASH
        cells.assume("stack", stack.name)
    if stack is MEGATRON_CLASSIC and zero_stage:
        # Megatron's own distributed optimizer came later; ZeRO then was DeepSpeed's.
        stack = DEEPSPEED_ZERO3 if zero_stage == 3 else MEGATRON_DEEPSPEED
        cells.assume("stack", stack.name)
    said = f"{cells.text('model')} {cells.text('notes')}"
    if DROPS_ROWS.search(said):
        stack = replace(stack, dropless=False, expert_imbalance=0.0)
    elif EVEN_ROUTING.search(said):
        stack = replace(stack, expert_imbalance=0.0)
    elif NATURAL_ROUTING.search(said):
        stack = replace(stack, expert_imbalance=NATURAL_IMBALANCE)
    sigma = real(cells.raw("expert_imbalance"))
    if sigma is not None:
        check_imbalance(sigma)
        stack = replace(stack, expert_imbalance=sigma)
    if stack.name in COMPILED_AS and COMPILED.search(said):
        stack = find_execution(COMPILED_AS[stack.name])
    if stack.scaling == "delayed" and re.search(r"(?i)block", cells.text("dtype")):
        # (On Blackwell the same recipe runs as blocks of 32, which its products take as they are.)
        is_blackwell = BLACKWELL.search(cells.text("gpu").upper()) is not None
        stack = stack if is_blackwell else replace(stack, scaling="tiles")
    elif stack.scaling == "delayed" and re.search(r"(?i)current", cells.text("dtype")):
        stack = replace(stack, scaling="current")
    if stack.scaling == "tensorwise":
        stack = replace(stack, scaling=_scaling(cells.text("dtype")))
    if dispatcher := _dispatcher(cells.text("dispatcher"), said):
        stack = replace(stack, dispatchers=(dispatcher,))
    stack = _said_parts(cells, stack)
    if OVERLAPS_ROWS.search(said):
        stack = replace(stack, overlaps=(*stack.overlaps, "rows"))
    if SERVED_BY_HOSTS.search(said):
        stack = replace(stack, polled_late_s=SERVED_LATE_S)
    if BESIDE_SHARED.search(said):
        stack = replace(stack, overlaps=(*stack.overlaps, "shared_rows"))
    graphs = CUDA_GRAPHS.search(said)
    return _graphed(stack, (graphs["parts"] or "").lower()) if graphs else stack


def _dispatcher(cell: str, said: str) -> str:
    """Return the dispatcher that a row names, in its own column or in words; "" for none."""
    for words, name in DISPATCHERS:
        # (What is gathered is said of weights, too.)
        if words.search(cell) or ("ep" in name and not cell and words.search(said)):
            return name
    return ""


def _said_parts(cells: Cells, stack: Execution) -> Execution:
    """Return a stack with what columns say of its attention, dropout, gradients and overlaps."""
    attention = cells.text("attention").lower()
    if attention:
        if attention not in ("fused", "flash", "unfused"):
            raise RowError(f"attention {attention!r} is not priced; use fused, flash or unfused")
        stack = replace(stack, flash_attention=attention != "unfused")
    dropout = cells.given("dropout", least=0)
    if dropout is not None:
        stack = replace(stack, dropout=bool(dropout))
    if cells.given("deterministic", least=0):
        stack = replace(stack, deterministic=True)
        if not stack.fuses_exact and not HOPPER.search(cells.text("gpu").upper()):
            stack = replace(stack, flash_attention=False)
    if attention and stack.attention_copies:
        takes_flash = attention == "flash" or _takes_flash(cells, stack)
        stack = replace(stack, samples_first=takes_flash)
    if cells.given("grouped_experts", least=0) == 0:
        stack = replace(stack, grouped_streams=0)
    kept = cells.text("keeps_narrow").lower().split()
    if unknown := [name for name in kept if name not in get_args(KeptNarrow)]:
        known = ", ".join(get_args(KeptNarrow))
        raise RowError(f"keeps_narrow={unknown[0]} is not priced; use some of {known}")
    if kept:
        chosen = tuple(name for name in get_args(KeptNarrow) if name in kept)
        stack = replace(stack, keeps_narrow=chosen)
    if cells.given("masks_batch", least=0):
        stack = replace(stack, masks_batch=True)
    if cells.given("cut_products", least=0):
        stack = replace(stack, layer_workspaces=CUT_STREAMS)
    gradient_bytes = _given_width(cells, "gradient_bytes")
    if gradient_bytes is not None:
        # Sums travel as they lie (megatron/core/distributed/param_and_grad_buffer.py).
        stack = replace(stack, gradient_bytes=gradient_bytes, reduced_bytes=gradient_bytes)
    if moment_bytes := _moment_widths(cells):
        stack = replace(stack, moment_bytes=moment_bytes)
    if master_bytes := _given_width(cells, "master_bytes"):
        stack = replace(stack, master_bytes=master_bytes)
    on_host = cells.given("layers_on_host", least=0)
    if on_host:
        if (cells.given("pp") or 1) > 1:
            # (Megatron-LM refuses it, too: transformer_config.py, cpu_offloading.)
            raise RowError(f"layers_on_host={on_host} with a pipeline is not priced; use pp=1")
        stack = replace(stack, layers_on_host=on_host)
    loss_bytes = cells.given("loss_bytes")
    if loss_bytes is not None:
        stack = replace(stack, loss_bytes=loss_bytes)
    if cells.text("cp_comm"):
        stack = replace(stack, rings_attention="gather" not in cells.text("cp_comm").lower())
    shown = cells.text("not_overlapped").lower().split()
    if unknown := [name for name in shown if name not in get_args(Overlapped)]:
        raise RowError(
            f"not_overlapped={unknown[0]} is no kind of collective; use some of "
            f"{', '.join(get_args(Overlapped))}"
        )
    if not shown:
        return stack
    return replace(stack, overlaps=tuple(name for name in stack.overlaps if name not in shown))


def _given_width(cells: Cells, column: str) -> int | None:
    """Return the bytes of an element that a column states."""
    width = cells.given(column)
    if width not in (None, 2, 4):
        raise RowError(f"{column}={width} is not priced; use 2 or 4")
    return width


def _moment_widths(cells: Cells) -> tuple[int, int] | None:
    """Return the bytes of an element of each moment: both as wide as one that is given alone."""
    text = cells.text("moment_bytes")
    if not text:
        return None
    widths = [real(word) for word in text.split()]
    if len(widths) > 2 or not set(widths) <= {1, 2, 4}:
        raise RowError(
            f"moment_bytes={text} is not priced; use 1, 2 or 4, or two of them as in 2 4"
        )
    first, second = (int(width or 0) for width in (widths[0], widths[-1]))
    return first, second


def _takes_flash(cells: Cells, stack: Execution) -> bool:
    """Whether Transformer Engine picks the portable kernel over cuDNN's: before Hopper, and on
    Blackwell where runs must be deterministic (pytorch/attention/dot_product_attention/utils.py,
    get_attention_backend).
    """
    gpu = cells.text("gpu").upper()
    is_older = any(word in gpu for word in OLDER_DEVICES)
    return is_older or (stack.deterministic and BLACKWELL.search(gpu) is not None)


def _scaling(dtype: str) -> Scaling:
    """Return the recipe of torchao that a dtype names."""
    return next((name for words, name in SCALINGS if re.search(words, dtype, re.I)), "tensorwise")


def _graphed(stack: Execution, parts: str) -> Execution:
    """Return a stack whose layers' named parts are graphs; all of a layer where none is named."""
    if "attention" not in parts and "router" not in parts:
        # A graph is one launch, whatever a layer's router and experts add.
        return replace(
            stack,
            forward_kernels=1,
            module_kernels=0,
            ring_kernels=0,
            router_kernels=0,
            expert_kernels=0,
            bias_kernels=0,
        )
    if "attention" in parts:
        left = min(stack.forward_kernels, LEFT_OF_ATTENTION)
        stack = replace(stack, forward_kernels=left, module_kernels=0, ring_kernels=0)
    if "router" in parts:
        stack = replace(stack, router_kernels=min(stack.router_kernels, LEFT_OF_ROUTER))
    return stack


def _usual_stack(cells: Cells, *, is_named: bool) -> Execution:
    """Return the stack of a row that names none, or (`is_named`) one that we do not know.

    Before fused attention it is Megatron's, not taken to recompute unless the row says so. ZeRO 3
    with it is FSDP; a blank is Transformer Engine, as most runs published since are.
    """
    if not is_modern(cells):
        return replace(MEGATRON_CLASSIC, recompute="none")
    if zero_of(cells.raw("zero_stage")) == 3:
        return FSDP_FLASH
    return EAGER_FLASH if is_named else MEGATRON_CORE


def is_modern(cells: Cells) -> bool:
    """Whether a row is of a time with fused attention: by its device, its model (gated, with
    shared keys and values) or its sequences.
    """
    gpu = cells.text("gpu").upper()
    if not any(word in gpu for word in OLDER_DEVICES) or "flash" in cells.text("stack").lower():
        return True
    known = named_model(cells.text("model"))
    gated = gated_of(cells.text("gated_ffn"))
    if gated is None and known is not None:
        gated = bool(known.gated_ffn)
    heads, kv_heads = cells.given("heads"), cells.given("kv_heads")
    shares_keys = bool(heads and kv_heads and kv_heads < heads)
    return bool(gated) or shares_keys or (seq_len_of(cells) or 0) > LONGEST_UNFUSED


def seq_len_of(cells: Cells) -> int | None:
    """Return the tokens of a sample that a row states, also as ``8k``."""
    return cells.given("seq_len", thousand=1024)
