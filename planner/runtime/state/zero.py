"""ZeRO 1, 2 and 3 with FSDP2: what is sharded, when it is gathered and reduced.

Sharded over the ranks "shards" of `planner.language.layout.axes`: all with the same parameters, or,
with axes whose ranks are copies (HSDP), some of them. Copies sum their shards of gradients once a
step, in the last backward.

    zero_stage   parameters in a step            gradients
    1            gathered once, kept             whole, reduce-scattered after the last microbatch
    2            gathered once, kept             reduce-scattered every microbatch, kept as shards
    3            gathered for every F and B      reduce-scattered every microbatch, kept as shards

Optimizer state follows the parameters, which are sharded between steps in all three, each along
the dim that `planner.language.layout.sharing.shard_dim` says. A frozen
parameter has neither gradient nor state: ZeRO 1 and 2 leave it whole on every rank, where
gathering it would be one exchange a step of what never changes; ZeRO 3 shards and gathers it
as the others, and reduces nothing of it. A number (a parameter without dims) can't be cut, and one
without elements has nothing to cut: each is whole on every rank, and its gradient is summed as
without ZeRO. So is a frozen complex one; complex parameters that train are refused. With
precision "bf16" or "fp16" the shards are fp32, what is gathered is cast, and gradients are summed
in fp32, over microbatches as over ranks. With the optimizer on the host, that is where the
shards rest: they are copied up to be gathered, and their gradients down once reduced. Weights that
are multiplied in 8 bits with one scale are gathered in 8 bits (`narrow_gather`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from planner.errors import LayoutError
from planner.language.layout.axes import EXPERT_COPIES, EXPERT_SHARDS, split_axes
from planner.language.layout.placement import Placement, Shard
from planner.language.layout.placements import Placements
from planner.language.layout.sharing import shard_dim
from planner.language.plan import Precision, low_dtype
from planner.language.plan.parts import gathers_narrow
from planner.language.plan.replication import has_shards
from planner.runtime.process import device as devices
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.stage import BlockModule, StageModule
from planner.runtime.state.narrow_gather import gather_narrow

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )
except ImportError:  # before torch 2.13
    ShardPlacementResult = None  # type: ignore[assignment,misc]


def torch_placement(placement: Placement) -> TorchPlacement:
    """Return the DTensor form of a parameter's placement."""
    return TorchShard(placement.dim) if isinstance(placement, Shard) else TorchReplicate()


def shard_stage(
    stage: StageModule,
    mesh: Mesh,
    zero_stage: int,
    placements: Mapping[str, Placements],
    precision: Precision,
    *,
    whole: Set[str] = frozenset(),
    on_host: bool = False,
    devices_of_node: int = 1,
) -> None:
    """Shard a stage in place, one FSDP2 unit per block and one for shared parameters.

    Parameters on the meta device get memory once they are shards, without values: so no rank ever
    holds a stage whole. `placements` gives those of each parameter by the user's name; those in
    `whole` are left alone. Nodes, of as many devices as planned for, say where weights are gathered
    in 8 bits. Raises LayoutError where more than one axis cuts parameters: FSDP2 takes
    DTensors of one axis.
    """
    device_mesh = mesh.device_mesh()
    cut = [axis.name for axis in split_axes() if mesh.size(axis.name) > 1]
    if len(cut) > 1:
        raise LayoutError(f"ZeRO goes with one axis that cuts parameters, not {' and '.join(cut)}")
    # Experts lie on a mesh of their own, with replicas of its own: these share them.
    experts = {fqn for fqn in stage.named_params() if placements[fqn].are_of_experts}
    alone = experts_alone({fqn: placements[fqn] for fqn in stage.named_params()}, mesh)
    if alone and on_host:  # FSDP2 takes shards there, and has none of them
        raise LayoutError(
            f"each rank has other experts ({min(alone)}), which ZeRO leaves as they are, and "
            "the plan has the optimizer on the host; use a smaller ep, or `zero` 0"
        )
    experts -= alone
    # Of tables with a gradient of rows (`whole`) the optimizer is given rows: FSDP2 has no form for
    # them.
    left = {p for fqn, p in stage.named_params().items() if fqn in whole | alone}
    _refuse_dtypes(stage, left, precision)
    _make_contiguous(stage, left)
    ignored = {p for p in stage.parameters() if not can_shard(p, zero_stage)} | left
    # Parameters become DTensors on tp, so that FSDP2's shards are DTensors on both axes and each
    # names its place in the whole.
    for axis in cut:
        _as_dtensors(stage, device_mesh[axis], axis, placements, ignored)
    of_experts: Mapping[nn.Parameter, Any] = {}
    if experts:
        of_experts = _experts_mesh(stage, mesh, placements, experts, ignored)
    # On two dims FSDP2 shards over the second and sums shards of gradients over the first (HSDP).
    data_mesh = device_mesh["shards"]
    if mesh.group("copies") is not None:
        data_mesh = device_mesh["copies", "shards"]
    # Inputs are cast by the programs, where the capture says so.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    cast_to = getattr(torch, low_dtype(precision)) if low_dtype(precision) else None
    if cast_to is not None:
        policy = MixedPrecisionPolicy(
            param_dtype=cast_to, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    offload = (
        CPUOffloadPolicy(pin_memory=devices.is_accelerator(mesh.device))
        if on_host
        else OffloadPolicy()
    )

    def placed(param: nn.Parameter) -> Any:
        own = param.to_local() if isinstance(param, DTensor) else param
        mesh_info = of_experts.get(param)
        parts = mesh.size("shards" if mesh_info is None else EXPERT_SHARDS)
        cut = TorchShard(shard_dim(own.shape, parts))
        return cut if mesh_info is None else ShardPlacementResult(cut, mesh_info)

    policies: dict[str, Any] = {
        "shard_placement_fn": placed,
        "mp_policy": policy,
        "offload_policy": offload,
        "ignored_params": ignored,
    }
    # Blocks first: a parameter belongs to the innermost unit around it, so the unit of the stage
    # gets only what several blocks share.
    for block in stage.blocks:
        assert isinstance(block, BlockModule)
        # ZeRO 3 frees a block's weights after each forward; 1 and 2 keep them until the last
        # backward.
        block.frees_params = zero_stage == 3
        block.casts_whole_to = cast_to
        fully_shard(block, mesh=data_mesh, reshard_after_forward=zero_stage == 3, **policies)
        if _gathers_narrow(mesh, precision, devices_of_node):
            gather_narrow(block, block.narrow_params)
    fully_shard(stage, mesh=data_mesh, reshard_after_forward=False, **policies)
    _fetch_ahead(stage)
    shards_on = torch.device("cpu") if on_host else mesh.device

    def materialize(param: Tensor) -> Tensor:
        # What FSDP2 leaves alone (numbers, frozen parameters under ZeRO 1 and 2) is whole on the
        # device.
        device = shards_on if isinstance(param, DTensor) else mesh.device
        return torch.empty_like(param, device=device) if param.is_meta else param

    _apply_to_shards(stage, materialize)
    for module in stage.modules():
        # The loss carries the weight of a part, as it does without ZeRO; sums stay sums.
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _gathers_narrow(mesh: Mesh, precision: Precision, devices_of_node: int) -> bool:
    """Whether weights are gathered in 8 bits among the ranks that share this rank's parameters."""
    group = mesh.group("shards")
    ranks = dist.get_process_group_ranks(group) if group is not None else [0]
    on_node = Counter(rank // devices_of_node for rank in ranks)
    return gathers_narrow(
        precision,
        nodes=len(on_node),
        ranks_of_node=max(on_node.values()),
        devices_of_node=devices_of_node,
    )


def experts_alone(placements: Mapping[str, Placements], mesh: Mesh) -> frozenset[str]:
    """Return the parameters of experts of which no ranks share shards: ZeRO leaves them whole."""
    if mesh.group(EXPERT_SHARDS) is not None:
        return frozenset()
    return frozenset(name for name, of in placements.items() if of.are_of_experts)


def _experts_mesh(
    stage: StageModule,
    mesh: Mesh,
    placements: Mapping[str, Placements],
    experts: Set[str],
    ignored: Set[nn.Parameter],
) -> dict[nn.Parameter, Any]:
    """Return which mesh FSDP2 shards each of the experts' parameters over, after making those that
    etp cuts DTensors of that mesh.

    Raises LayoutError before torch 2.13, where FSDP2 takes one mesh a unit.
    """
    if ShardPlacementResult is None:
        raise LayoutError(
            f"ZeRO of experts on ranks of their own takes torch 2.13 or later, and this is torch "
            f"{torch.__version__}; upgrade it, or search with `zero` 0 or `ep` 1"
        )
    device_mesh = mesh.experts_device_mesh()
    if mesh.size("etp") > 1:
        _as_dtensors(stage, device_mesh["etp"], "etp", placements, ignored, experts)
    if mesh.group(EXPERT_COPIES) is None:
        info = FSDPMeshInfo(device_mesh[EXPERT_SHARDS], shard_mesh_dim=0)
    else:
        both = device_mesh[EXPERT_COPIES, EXPERT_SHARDS]
        info = HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
    return {param: info for fqn, param in stage.named_params().items() if fqn in experts}


def _fetch_ahead(stage: StageModule) -> None:
    """Let each block's backward gather the weights of the block before it, if they are not there.

    FSDP2 takes the forward that was before: behind a stage's first block that is the last block of
    another microbatch, which it would gather for nothing (under ZeRO 1 and 2 in the last backward,
    where blocks give their whole weights back).
    """
    before: FSDPModule | None = None
    for block in stage.blocks:
        if next(block.parameters(), None) is None:
            continue
        assert isinstance(block, FSDPModule)
        # (The first block fetches itself, which is there.)
        block.set_modules_to_backward_prefetch([before or block])
        before = block


def quiet_views() -> None:
    """Let FSDP2 not warn of blocks that return views: a block's program writes into nothing that
    another handed on, as a capture made all writes pure.

    Each step says so: who leaves ``warnings.catch_warnings`` takes filters set inside away.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def can_shard(param: Tensor, zero_stage: int) -> bool:
    """Whether ZeRO shards a parameter."""
    is_cut = has_shards(param.shape, dtype_name(param))
    return is_cut and (param.requires_grad or zero_stage == 3)


def dtype_name(param: Tensor) -> str:
    """Return a parameter's dtype as graphs have it."""
    return str(param.dtype).removeprefix("torch.")


def _refuse_dtypes(stage: StageModule, left: Set[nn.Parameter], precision: Precision) -> None:
    """Raise LayoutError where a unit has complex parameters, or parameters of several dtypes: it is
    gathered as one, those that are `left` alone apart
    (`planner.language.plan.replication.why_no_zero`).
    """
    for module in (*stage.blocks, stage):
        trained = {
            name: param
            for name, param in module.named_parameters(recurse=module is not stage)
            if param.requires_grad and param.dim() and param not in left
        }
        for name, param in trained.items():
            if param.is_complex():
                raise LayoutError(
                    f"ZeRO shards no complex parameters ({name} {param.dtype}); search with "
                    "`zero` 0"
                )
        own = {p.dtype: n for n, p in trained.items() if has_shards(p.shape, dtype_name(p))}
        if len(own) > 1:
            found = " and ".join(f"{name} {dtype}" for dtype, name in own.items())
            cast = "" if low_dtype(precision) else "plan with precision bf16, "
            raise LayoutError(
                f"ZeRO gathers the parameters of a block together, and those of a block have "
                f"several dtypes ({found}); give them one dtype, {cast}or search with `zero` 0"
            )


def _make_contiguous(stage: StageModule, left: Set[nn.Parameter]) -> None:
    """Lay parameters out in the order of their dims, as FSDP2 needs them; some are `left` alone."""
    for module in stage.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in left and not param.is_contiguous():
                made = nn.Parameter(param.detach().contiguous(), param.requires_grad)
                module._parameters[name] = made


def _apply_to_shards(stage: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to all tensors of a stage, and let FSDP2 take up its shards anew.

    Parameters that FSDP2 leaves alone (frozen ones under ZeRO 1 and 2) are made here: in a dry run
    they are fake tensors, for which ``Module._apply`` takes a way that what watches them forbids.
    """
    plain = [
        (module, name, param)
        for module in stage.modules()
        for name, param in module._parameters.items()
        if param is not None and not isinstance(param, DTensor)
    ]
    made = {
        param: nn.Parameter(function(param), param.requires_grad) if param.is_meta else param
        for _, _, param in plain
    }
    for module, name, _ in plain:
        module._parameters[name] = None
    stage._apply(function)
    for module, name, param in plain:
        module._parameters[name] = made[param]


def before_backward(
    stage: nn.Module, zero_stage: int, *, is_last: bool, is_update: bool = True
) -> None:
    """Tell FSDP2 what to do in the backward that comes.

    `is_last` is the stage's last of a batch; with `is_update` no other batch comes before the
    optimizer steps.
    """
    assert isinstance(stage, FSDPModule)
    # Without sync FSDP2 accumulates the gathered gradient: whole, as ZeRO 1 keeps it.
    stage.set_requires_gradient_sync(zero_stage > 1 or (is_last and is_update))
    # Copies add up to the same sum once as after each microbatch.
    stage.set_requires_all_reduce(is_last)
    # ZeRO 1 and 2 gather once a step: weights stay through all microbatches.
    stage.set_reshard_after_backward(zero_stage == 3 or is_last)
    # FSDP2 waits for pending reductions, and drops its notes for prefetching, in the
    # last backward alone.
    stage.set_is_last_backward(is_last)


def forget_gradients(stage: nn.Module) -> None:
    """Let go of gradients that FSDP2 has not reduced: of batches that no update followed.

    ZeRO 1 keeps them whole over all batches of an update, beside the shards' `grad`.
    """
    for module in stage.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        # (Before torch 2.13 a unit has one group.)
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


def end_without_backward(stage: nn.Module) -> None:
    """Tell FSDP2 that no backward follows a forward: nothing before the stage's end is trained.

    It notes each forward to prefetch in the backward, whose end lets the notes go, and weights
    that are still gathered.
    """
    assert isinstance(stage, FSDPModule)
    stage.reshard()
    if hasattr(stage, "reset_iter_state"):  # from torch 2.13 on
        stage.reset_iter_state()


def rest(stage: nn.Module) -> None:
    """Let go of weights that are gathered, as they are after an evaluation: shards remain."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _as_dtensors(
    stage: StageModule,
    mesh: DeviceMesh,
    axis: str,
    placements: Mapping[str, Placements],
    ignored: Set[nn.Parameter],
    only: Set[str] | None = None,
) -> None:
    """Make DTensors of the pieces on an axis: of parameters that lie on its mesh, or of those named
    `only`.
    """
    for block in stage.blocks:
        assert isinstance(block, BlockModule)
        block.params_are_dtensors = True
    for path, fqn in stage.fqns.items():
        owner, _, name = path.rpartition(".")
        module = stage.get_submodule(owner)
        param = module.get_parameter(name)
        is_other = placements[fqn].are_of_experts if only is None else fqn not in only
        if param in ignored or is_other:
            continue
        local = DTensor.from_local(
            param.detach(), mesh, [torch_placement(placements[fqn][axis])], run_check=False
        )
        module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
