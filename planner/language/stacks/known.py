"""The training systems that plans are written for. The emitter of each names its sources."""

from __future__ import annotations

from dataclasses import replace

from planner.language.stacks.stack import Stack, TensorParallel, register_stack

MEGATRON_LM = register_stack(
    Stack(
        name="megatron-lm",
        title="Megatron-LM",
        executions=("megatron-core", "megatron-classic"),
        aliases=("megatron",),
        # Of its recipes in 8 bits tensorwise has a scale of the factor at hand, mxfp8 of blocks.
        precisions=("bf16", "fp16", "fp8-tensorwise", "mxfp8"),
        degrees=("dp", "tp", "cp", "ep", "etp", "pp", "vpp"),
        zero_stages=(0, 1, 2, 3),
        # Its optimizer on the host is a precision-aware one, which is distributed in any case;
        # Megatron-FSDP, its ZeRO 2 and 3, has none.
        zero_beside=(("optimizer-on-host", (1,)),),
        schedules=("1f1b", "interleaved_1f1b"),
        whole_groups=True,
        recomputes=("none", "full", "core attention"),
        recomputes_first=True,
        on_host=("optimizer",),
        tensor_parallel=TensorParallel(sequence_parallel="with experts", copies_key_heads=True),
        cp_kinds=("gathered", "heads", "ring"),
        cp_pieces=2,
    )
)

MEGATRON_BRIDGE = register_stack(
    replace(
        MEGATRON_LM,
        name="megatron-bridge",
        title="Megatron-Bridge",
        executions=("megatron-bridge",),
        aliases=(),
        # Without mixed precision a recipe trains in the dtype of its model's published weights,
        # which is a 16-bit one.
        own_dtypes=(),
        # Its recipe of fp16 sums gradients in fp16 (`fp16_mixed`), those in 8 bits leave the first
        # and the last layer in 16 (`bf16_with_fp8_current_scaling_mixed`).
        precisions=("bf16",),
    )
)

TORCHTITAN = register_stack(
    Stack(
        name="torchtitan",
        title="torchtitan",
        executions=("torchtitan", "torchtitan-compiled"),
        aliases=("titan",),
        degrees=("rp", "dp", "tp", "cp", "ep", "pp", "vpp"),
        zero_stages=(0, 2, 3),
        schedules=None,
        # `apply_moe_ep_tp`: without ep, matrices of experts are cut on tp as those of other layers.
        tensor_parallel=TensorParallel(experts=("none", "cut")),
        cp_kinds=("gathered",),
        own_dtypes=("bfloat16", "float32"),
        precisions=("bf16", "fp8", "mxfp8"),
        narrow_layers="chosen",
        converts_named=("mxfp8",),
        counts_tokens=True,
    )
)

TORCHTITAN_TOML = replace(
    TORCHTITAN,
    name="torchtitan-toml",
    title="torchtitan v0.2",
    aliases=(),
    degrees=(*TORCHTITAN.degrees, "etp"),
    cp_kinds=("gathered", "ring"),
    # Its converter to mxfp8 goes with no tp where blocks are compiled.
    precisions=("bf16", "fp8", "fp8-tensorwise"),
    # A prototype scales rows of experts, without pp and cp.
    narrow_experts=False,
    # It replicates (ZeRO 0) only where nothing else is parallel.
    zero_beside=tuple((name, (2, 3)) for name in ("tp", "cp", "pp")),
    tensor_parallel=TensorParallel(sequence_parallel="always", experts=("none", "cut")),
)
"""An older form of torchtitan's configuration, for which nothing is searched."""

DEEPSPEED = register_stack(
    Stack(
        name="deepspeed",
        title="DeepSpeed",
        executions=("deepspeed-zero3",),
        precisions=("bf16", "fp16"),
        degrees=("dp", "tp", "ep"),
        zero_stages=(0, 1, 2, 3),
        # Where AutoEP finds experts: `moe_layer_pattern` of all its presets (transformers 5).
        experts_named=r"model\.layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj)",
        # AutoTP goes with ZeRO 0 to 2.
        zero_beside=(("tp", (0, 1, 2)), ("optimizer-on-host", (1, 2, 3))),
        on_host=("optimizer",),
    )
)

NANOTRON = register_stack(
    Stack(
        name="nanotron",
        title="nanotron",
        executions=("nanotron",),
        degrees=("dp", "tp", "cp", "pp"),
        zero_stages=(0, 1),
        schedules=("1f1b", "fthenb"),
        cuts="its own",
        tensor_parallel=TensorParallel(),
        cp_kinds=("gathered",),
        counts_tokens=True,
    )
)

ACCELERATE = register_stack(
    Stack(
        name="accelerate",
        title="accelerate",
        executions=("fsdp-flash",),
        aliases=("fsdp",),
        precisions=("bf16", "fp16"),
        degrees=("rp", "dp", "tp", "cp"),
        zero_stages=(0, 2, 3),
        # Beside FSDP2 alone, which ZeRO 2 and 3 are.
        zero_beside=tuple((name, (2, 3)) for name in ("rp", "tp", "cp", "recompute")),
        cp_kinds=("gathered", "ring"),
    )
)
