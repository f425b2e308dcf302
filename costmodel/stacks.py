"""Named software stacks: which kernels a published run used, and what it overlapped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Options of the cost model that a kind of training software fixes.

    `forward_kernels` are launches of one layer's forward (a backward has twice as many);
    `vendor_attention` is attention made for the device (cuDNN) instead of portable code;
    `pointwise_factor` how many times the bytes of fused pointwise kernels are moved;
    `gradient_bytes` the bytes an accumulated gradient element takes in memory,
    `reduced_bytes` on the wire; `optimizer_pass_bytes` the bytes an optimizer step moves for
    each parameter; `loss_pass_bytes` those the loss moves for each logit, forward and backward
    together; `state_bytes` an element's optimizer state, master weight included.
    `overlaps_*` tells what runs while the device computes.
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
    gradient_bytes: int
    reduced_bytes: int
    optimizer_pass_bytes: float
    loss_pass_bytes: float
    overlaps_tp: bool
    overlaps_dp: bool
    overlaps_pp: bool
    state_bytes: int


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
    gradient_bytes=2,
    reduced_bytes=2,
    optimizer_pass_bytes=56,
    loss_pass_bytes=75,
    overlaps_tp=False,
    overlaps_dp=False,
    overlaps_pp=False,
    state_bytes=12,
)
"""Megatron-LM of 2020 to 2022: fp16, fused softmax, unfused attention, nothing overlapped."""

MEGATRON_TE = Stack(
    name="megatron-te",
    flash_attention=True,
    vendor_attention=True,
    pointwise_factor=1.0,
    dropout=False,
    sequence_parallel=True,
    zero_stage=1,
    recompute="none",
    forward_kernels=16,
    gradient_bytes=4,
    reduced_bytes=2,
    optimizer_pass_bytes=38,
    loss_pass_bytes=20,
    overlaps_tp=True,
    overlaps_dp=True,
    overlaps_pp=True,
    state_bytes=12,
)
"""Megatron-Core with Transformer Engine: bf16 or fp8, flash attention, overlapped collectives."""

FSDP_FLASH = Stack(
    name="fsdp-flash",
    flash_attention=True,
    vendor_attention=False,
    pointwise_factor=2.0,
    dropout=False,
    sequence_parallel=True,
    zero_stage=3,
    recompute="none",
    forward_kernels=24,
    gradient_bytes=4,
    reduced_bytes=4,
    optimizer_pass_bytes=32,
    loss_pass_bytes=34,
    overlaps_tp=False,
    overlaps_dp=True,
    overlaps_pp=False,
    state_bytes=12,
)
"""PyTorch FSDP with flash attention: parameters gathered layer by layer ahead of their use."""

STACKS = {stack.name: stack for stack in (MEGATRON_CLASSIC, MEGATRON_TE, FSDP_FLASH)}
