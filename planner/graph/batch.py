"""A batch as leaves and structure, so that graphs and plans can speak of "input 2" by path.

The structure ("tree") is JSON data: ``{"tensor": path}``, ``{"dict": [[key, tree], …]}``,
``{"tuple": [tree, …]}``, ``{"list": […]}`` or ``{"value": scalar}``; None and other plain
scalars are values. Torch is not imported: anything with `shape` and `dtype` is a leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import ModelError
from planner.graph.model_graph import Affine, ModelGraph

Tree = dict[str, Any]


def flatten_batch(batch: Any) -> tuple[dict[str, Any], Tree]:
    """Return the batch's tensors by path, in order, and its structure.

    Raises ModelError for a leaf that is neither a tensor nor a JSON scalar.
    """
    leaves: dict[str, Any] = {}
    return leaves, _flatten(batch, "", leaves)


def _flatten(value: Any, path: str, leaves: dict[str, Any]) -> Tree:
    def inner(key: object) -> str:
        return f"{path}.{key}" if path else str(key)

    is_numpys = hasattr(value, "__array_interface__")
    if hasattr(value, "shape") and hasattr(value, "dtype") and not is_numpys:
        leaves[path or "batch"] = value
        return {"tensor": path or "batch"}
    if isinstance(value, Mapping):
        return {"dict": [[str(k), _flatten(v, inner(k), leaves)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_flatten(v, inner(i), leaves) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ModelError(
        f"batch leaf {path or 'batch'!r} is a {type(value).__name__}; "
        "use tensors (torch.from_numpy makes one), numbers, strings or None inside dicts, tuples "
        "and lists"
    )


def plain_values(tree: Tree, path: str = "") -> dict[str, Any]:
    """Return the values of a structure that are no tensors, by path; None is left out."""
    (kind, value) = next(iter(tree.items()))
    if kind == "value":
        return {} if value is None else {path or "batch": value}
    if kind == "tensor":
        return {}
    items = value if kind == "dict" else enumerate(value)
    found: dict[str, Any] = {}
    for key, item in items:
        found |= plain_values(item, f"{path}.{key}" if path else str(key))
    return found


def tensor_paths(tree: Any) -> set[str]:
    """Return the paths of a structure's tensors; raise ValueError if it is not a structure."""
    found: set[str] = set()
    waiting = [tree]
    while waiting:
        match waiting.pop():
            case {"tensor": str(path)}:
                found.add(path)
            case {"dict": list(pairs)} if all(
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
                for pair in pairs
            ):
                waiting += [item for _, item in pairs]
            case {"tuple": list(items)} | {"list": list(items)}:
                waiting += items
            case {"value": None | bool() | int() | float() | str()}:
                pass
            case other:
                raise ValueError(f"{str(other)[:40]} is not the structure of a batch")
    return found


def unflatten_batch(tree: Tree, leaves: Mapping[str, Any]) -> Any:
    """Rebuild a batch from its structure and its tensors by path."""
    (kind, value) = next(iter(tree.items()))
    if kind == "tensor":
        return leaves[value]
    if kind == "dict":
        return {key: unflatten_batch(item, leaves) for key, item in value}
    if kind == "tuple":
        return tuple(unflatten_batch(item, leaves) for item in value)
    if kind == "list":
        return [unflatten_batch(item, leaves) for item in value]
    return value


def call_with_batch(module: Any, batch: Any) -> Any:
    """Call a module on a batch: a dict by keyword, a tuple or list by position."""
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, tuple | list):
        return module(*batch)
    return module(batch)


def loss_of(output: Any, batch: Any, loss: Any = None) -> Any:
    """Return the scalar loss of a forward output.

    With `loss` (a function of output and batch) that decides; otherwise the output's
    `.loss`, its ``["loss"]``, or the output itself. Raises ModelError if none is a scalar
    tensor.
    """
    value = output
    if loss is not None:
        value = loss(output, batch)
    elif getattr(output, "loss", None) is not None:
        value = output.loss
    elif isinstance(output, Mapping) and "loss" in output:
        value = output["loss"]
    if not hasattr(value, "shape") or len(value.shape) != 0:
        got = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
        raise ModelError(
            f"forward returned {got}, not a scalar loss; return the loss, an object with .loss, "
            "or define loss(output, batch) beside model()"
        )
    return value


def tokens_per_sample(graph: ModelGraph) -> int:
    """Return the tokens of one sample: entries of its first [batch, sequence] whole numbers.

    0 where the batch holds none.
    """
    for name in graph.batch_inputs:
        meta = graph.tensor[name]
        if meta.dtype.startswith("int") and len(meta.shape) == 2:
            first, length = meta.shape
            if isinstance(first, Affine) and not isinstance(length, Affine):
                return length
    return 0
