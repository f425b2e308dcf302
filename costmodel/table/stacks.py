"""Named software stacks: which kernels a published run used, and what it overlapped."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Options of the cost model that a kind of training software fixes.

    `forward_kernels` are what the host issues for one layer's forward (a backward has twice as
    many), `head_kernels` of the output matrix and the loss;
    `vendor_attention` is attention made for the device (cuDNN) instead of portable code;
    `pointwise_factor` how many times the bytes of fused pointwise kernels are moved;
    `gradient_bytes` the bytes an accumulated gradient element takes in memory,
    `accumulate_bytes` those that adding a microbatch's to it moves, and
    `reduced_bytes` on the wire; `optimizer_pass_bytes` the bytes an optimizer step moves for
    each parameter; `loss_pass_bytes` those the loss moves for each logit, forward and backward
    together; `state_bytes` an element's optimizer state, master weight included.
    `overlaps_*` tells what runs while the device computes: tensor-parallel collectives, the
    gathers of sharded weights, gradients' reductions, transfers between stages. Without
    `uses_all_links`, gathers and scatters of ZeRO 3 go over one link of a node. With
    `launches_block` the host waits for the end of each kernel it starts. Where
    `selective_skips_layers`, selective recompute runs every second layer again, instead of
    the attention of each. A stack that `interleaves` deals virtual stages where a row does not
    say. `seq_len` is a usual sequence length.
    """

    name: str
    flash_attention: bool
    vendor_attention: bool
    pointwise_factor: float
    dropout: bool
    sequence_parallel: bool
    zero_stage: int
    recompute: str
    forward_kernels: int
    head_kernels: int
    gradient_bytes: int
    accumulate_bytes: int
    reduced_bytes: int
    optimizer_pass_bytes: float
    loss_pass_bytes: float
    overlaps_tp: bool
    overlaps_gathers: bool
    overlaps_dp: bool
    overlaps_pp: bool
    state_bytes: int
    uses_all_links: bool = True
    launches_block: bool = False
    selective_skips_layers: bool = False
    interleaves: bool = False
    seq_len: int = 2048


MEGATRON_CLASSIC = Stack(
    name="megatron-classic",
    flash_attention=False,
    vendor_attention=False,
    pointwise_factor=1.0,
    dropout=True,
    sequence_parallel=False,
    zero_stage=0,
    recompute="full",
    forward_kernels=22,
    head_kernels=30,
    gradient_bytes=2,
    accumulate_bytes=6,
    reduced_bytes=2,
    optimizer_pass_bytes=40,
    loss_pass_bytes=75,
    overlaps_tp=False,
    overlaps_gathers=False,
    overlaps_dp=False,
    overlaps_pp=False,
    state_bytes=12,
)
"""Megatron-LM of 2020 to 2022: fp16, fused softmax, unfused attention, nothing overlapped. Its
optimizer step moves 28 bytes of Adam's, 6 of gradients to 32 bits, 6 of weights back to 16."""

MEGATRON_DEEPSPEED = replace(
    MEGATRON_CLASSIC, name="megatron-deepspeed", zero_stage=1, launches_block=True
)
"""Megatron on DeepSpeed's pipeline engine with ZeRO 1, as BigScience ran it in 2022: under
CUDA_LAUNCH_BLOCKING=1, against hangs (tr11-176B-ml/chronicles-prequel.md)."""

DEEPSPEED_ZERO3 = replace(
    MEGATRON_CLASSIC,
    name="deepspeed-zero3",
    zero_stage=3,
    overlaps_gathers=True,
    uses_all_links=False,
)
"""Megatron's model under DeepSpeed's first ZeRO 3 (2021): weights are fetched ahead, gradients
scattered in the way of the backward; Narayanan et al. 2021, table 2, ran it."""

MEGATRON_TE = Stack(
    name="megatron-te",
    flash_attention=True,
    vendor_attention=True,
    pointwise_factor=1.0,
    dropout=False,
    sequence_parallel=True,
    zero_stage=1,
    recompute="none",
    forward_kernels=32,
    head_kernels=10,
    gradient_bytes=4,
    accumulate_bytes=6,
    reduced_bytes=2,
    optimizer_pass_bytes=38,
    loss_pass_bytes=20,
    overlaps_tp=True,
    overlaps_gathers=True,
    overlaps_dp=True,
    overlaps_pp=True,
    state_bytes=12,
    interleaves=True,
    seq_len=4096,
)
"""Megatron-Core with Transformer Engine: bf16 or fp8, flash attention, overlapped collectives.
Its fused modules issue fewer kernels than eager ones, each from more Python."""

FSDP_FLASH = Stack(
    name="fsdp-flash",
    flash_attention=True,
    vendor_attention=False,
    pointwise_factor=2.0,
    dropout=False,
    sequence_parallel=True,
    zero_stage=3,
    recompute="none",
    forward_kernels=48,
    head_kernels=10,
    gradient_bytes=4,
    accumulate_bytes=0,
    reduced_bytes=4,
    optimizer_pass_bytes=32,
    loss_pass_bytes=34,
    overlaps_tp=False,
    overlaps_gathers=True,
    overlaps_dp=True,
    overlaps_pp=False,
    state_bytes=12,
    selective_skips_layers=True,
    seq_len=8192,
)
"""PyTorch FSDP with flash attention: parameters gathered layer by layer ahead of their use, by
hooks that issue about as many ops as the layer does."""

EAGER_FLASH = replace(
    FSDP_FLASH,
    name="eager-flash",
    zero_stage=1,
    overlaps_gathers=False,
    overlaps_dp=False,
    selective_skips_layers=False,
    seq_len=4096,
)
"""Frameworks of research groups, with flash attention and a distributed optimizer: portable and
eager kernels, every collective in the way of compute."""

STACKS = {
    stack.name: stack
    for stack in (
        MEGATRON_CLASSIC,
        MEGATRON_DEEPSPEED,
        DEEPSPEED_ZERO3,
        MEGATRON_TE,
        FSDP_FLASH,
        EAGER_FLASH,
    )
}
