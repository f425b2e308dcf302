"""What a model's state dict has that no block of its graph uses alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from planner.language.graph import ModelGraph


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by every name, in the order of a state dict.

    What hooks of a state dict add or rename there, and extra state, is no tensor of a module.
    """
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        passing = part._non_persistent_buffers_set
        own: dict[str, Tensor | None] = {
            **part._parameters,
            **{name: buffer for name, buffer in part._buffers.items() if name not in passing},
        }
        for name, tensor in own.items():
            if tensor is not None:
                found[f"{path}.{name}" if path else name] = tensor.detach()
    return found


def kept_outside(
    stored: Mapping[str, Tensor], *, held: Collection[str], read: Collection[str]
) -> dict[str, Tensor]:
    """Return those of a model's tensors, by every name, that stages do not hold alone; names of a
    tied tensor have the same object.
    """
    kept: dict[str, Tensor] = {}
    first: dict[tuple[int, int], Tensor] = {}
    for name, tensor in stored.items():
        if name in read or name not in held:
            # Tied tensors are found by where they lie.
            place = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
            known = first.setdefault(place, tensor)
            is_same = (known.shape, known.dtype) == (tensor.shape, tensor.dtype)
            kept[name] = known if is_same else tensor
    return kept


def outside_bytes(graph: ModelGraph, model: nn.Module) -> int:
    """Return the bytes that each rank so keeps of a model under any plan of its graph."""
    used = {name for block in graph.blocks for name in block.params}
    kept = kept_outside(
        stored_tensors(model),
        held={name for t in graph.tensors if t.name in used for name in (t.fqn, *t.aliases)},
        read={graph.tensor[name].fqn for name in graph.preamble.params},
    )
    return sum(tensor.nbytes for tensor in distinct(kept))


def distinct(tensors: Mapping[str, Tensor]) -> Collection[Tensor]:
    """Return the tensors that are behind all names, each once."""
    return {id(tensor): tensor for tensor in tensors.values()}.values()
