"""A batch as leaves and structure, so that graphs and plans can speak of "input 2" by path.

The structure ("tree") is JSON data: ``{"tensor": path}``, ``{"dict": [[key, tree], …]}``,
``{"tuple": [tree, …]}``, ``{"list": […]}``, ``{"value": scalar}``, or, for a namedtuple and for
mappings other than dict, ``{"made": [class, [[key, tree], …]]}``; None and other plain scalars are
values. Torch is not imported: anything with `shape` and `dtype` is a leaf.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from planner.errors import ModelError
from planner.language.graph.batch_classes import class_called, name_of
from planner.language.graph.model_graph import Affine, ModelGraph

Tree = dict[str, Any]

_IN_STRUCTURES = "inside dicts, tuples, namedtuples and lists"


def flatten_batch(batch: Any) -> tuple[dict[str, Any], Tree]:
    """Return the batch's tensors by path, in order, and its structure.

    Raises ModelError for an entry that the structure can't say: neither a tensor nor a JSON scalar,
    a sparse or nested tensor, a class of the user's own that is no namedtuple or mapping.
    """
    leaves: dict[str, Any] = {}
    return leaves, _flatten(batch, "", leaves)


def _flatten(value: Any, path: str, leaves: dict[str, Any]) -> Tree:
    def pairs(items: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
        return [[key, _flatten(v, _inner(path, key), leaves)] for key, v in items]

    kind = type(value)
    if kind is dict:
        return {"dict": pairs(_keyed(value, path).items())}
    if isinstance(value, Mapping):
        items = dict(_keyed(value, path))
        _refuse_lossy(value, items, path)
        return {"made": [name_of(kind), pairs(items.items())]}
    if hasattr(value, "shape") and hasattr(value, "dtype") and not _is_numpys(value):
        _refuse_layout(value, path)
        leaves[path or "batch"] = value
        return {"tensor": path or "batch"}
    if is_namedtuple(value) and kind.__name__ != "PackedSequence":
        return {"made": [name_of(kind), pairs(zip(kind._fields, value, strict=True))]}
    if kind in (tuple, list):
        return {kind.__name__: [tree for _, tree in pairs(enumerate(value))]}
    if value is None or kind in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, float) and _is_numpys(value):
        return {"value": float(value)}
    raise ModelError(f"batch leaf {path or 'batch'!r} is a {kind.__name__}; {_instead(value)}")


def _inner(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_numpys(value: Any) -> bool:
    return hasattr(value, "__array_interface__")


def is_namedtuple(value: Any) -> bool:
    """Whether a value is of a class that `collections.namedtuple` or `typing.NamedTuple` makes."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def _keyed(value: Mapping[Any, Any], path: str) -> Mapping[Any, Any]:
    """Return a mapping whose keys JSON has, each of its own path."""
    for key in value:
        if type(key) not in (str, int):
            raise ModelError(
                f"batch entry {path or 'batch'!r} has the key {key!r}, a {type(key).__name__}; use "
                "strings or whole numbers for keys"
            )
    if len({str(key) for key in value}) < len(value):
        raise ModelError(
            f"batch entry {path or 'batch'!r} has a number and its digits for keys; name one of "
            "them otherwise"
        )
    return value


def _refuse_layout(value: Any, path: str) -> None:
    """Refuse a tensor whose samples are no rows of it."""
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout == "torch.strided" and not getattr(value, "is_nested", False):
        return
    what = layout.removeprefix("torch.")
    if what.startswith("sparse"):
        instead = "x.to_dense(), or its indices and values as tensors that forward puts together"
    else:
        what = "nested"
        instead = "one tensor filled up to the longest, with a mask or lengths beside it"
    raise ModelError(
        f"batch leaf {path or 'batch'!r} is a {what} tensor, which can't be cut by samples; give "
        f"{instead}"
    )


def _refuse_lossy(value: Mapping[Any, Any], items: dict[Any, Any], path: str) -> None:
    """Refuse a mapping that its items do not make again: what else it holds would be lost."""
    try:
        again = _mapping(type(value), items)
        same = type(again) is type(value) and list(again) == list(items)
        same = same and all(again[key] is items[key] for key in items)
    except Exception:
        same = False
    if not same:
        raise ModelError(
            f"batch entry {path or 'batch'!r} is a {type(value).__name__}, a mapping that can't be "
            f"made of its items again (by {type(value).__name__}(items)); give a dict: "
            "dict(batch)"
        )


def _mapping(kind: Any, items: dict[Any, Any]) -> Any:
    # A key that is not there is an error then: what a default would be, no plan says.
    return kind(None, items) if issubclass(kind, defaultdict) else kind(items)


def _instead(value: Any) -> str:
    """What to give in the place of a value that is no part of a structure."""
    if is_dataclass(value):
        return (
            "a dataclass is not taken apart: use a typing.NamedTuple of the same fields, or a dict "
            "(dataclasses.asdict makes one)"
        )
    if type(value).__name__ == "PackedSequence":
        return (
            "its rows are those of all samples, step by step, and can't be cut by samples: give "
            "the padded tensor with its lengths"
        )
    if isinstance(value, tuple | list):
        plain = "tuple" if isinstance(value, tuple) else "list"
        return f"a {plain} of its own class would come back as a plain one: give {plain}(...) of it"
    if isinstance(value, bool | int | float | str):
        return "it would come back as a plain value: give its number or its text"
    if isinstance(value, set | frozenset):
        return "a set has no order: use a list"
    return f"use tensors (torch.from_numpy makes one), numbers, strings or None {_IN_STRUCTURES}"


def _inside(tree: Tree) -> Iterator[tuple[Any, Tree]]:
    """Yield what a structure has in it, with its key there."""
    (kind, value) = next(iter(tree.items()))
    if kind in ("dict", "made"):
        yield from ((key, item) for key, item in (value if kind == "dict" else value[1]))
    elif kind in ("tuple", "list"):
        yield from enumerate(value)


def plain_values(tree: Tree, path: str = "") -> dict[str, Any]:
    """Return the values of a structure that are no tensors, by path; None is left out."""
    if "value" in tree:
        return {} if tree["value"] is None else {path or "batch": tree["value"]}
    found: dict[str, Any] = {}
    for key, item in _inside(tree):
        found |= plain_values(item, _inner(path, key))
    return found


def classes_in(tree: Tree, path: str = "") -> dict[str, str]:
    """Return the names of classes that a structure is made with, by the path they are first at."""
    found: dict[str, str] = {}
    if "made" in tree:
        found[tree["made"][0]] = path or "batch"
    for key, item in _inside(tree):
        found = classes_in(item, _inner(path, key)) | found
    return found


def difference(first: Tree, second: Tree, path: str = "") -> str:
    """Say where two structures are not the same; empty where they are."""
    if first == second:
        return ""
    where, ((kind, a), (other, b)) = (
        path or "batch",
        (next(iter(t.items())) for t in (first, second)),
    )
    if kind != other:
        return f"{where} is a {_KINDS.get(kind, kind)} and a {_KINDS.get(other, other)}"
    if kind == "value":
        return f"{where} is {a!r} and {b!r}"
    if kind == "made" and a[0] != b[0]:
        return f"{where} is a {a[0]} and a {b[0]}"
    own, others = list(_inside(first)), list(_inside(second))
    if [key for key, _ in own] != [key for key, _ in others]:
        if kind in ("tuple", "list"):
            return f"{where} is a {kind} of {len(own)} and of {len(others)} entries"
        apart = {key for key, _ in own} ^ {key for key, _ in others}
        return f"{where} has {', '.join(map(str, sorted(apart, key=str)))} in one of them alone"
    told = (
        difference(x, y, _inner(path, key)) for (key, x), (_, y) in zip(own, others, strict=True)
    )
    return next((text for text in told if text), f"{where} is another")


_KINDS = {"made": "namedtuple or mapping", "value": "plain value"}


def tensor_paths(tree: Any) -> set[str]:
    """Return the paths of a structure's tensors; raise ValueError if it is not a structure."""
    found: set[str] = set()
    waiting = [tree]
    while waiting:
        match waiting.pop():
            case {"tensor": str(path)}:
                found.add(path)
            case {"dict": list(pairs)} | {"made": [str(), list(pairs)]} if all(
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int)
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
    """Rebuild a batch from its structure and its tensors by path.

    Raises ModelError for a class that this process can't import.
    """
    (kind, value) = next(iter(tree.items()))
    if kind == "tensor":
        return leaves[value]
    if kind in ("dict", "made"):
        pairs = value if kind == "dict" else value[1]
        items = {key: unflatten_batch(item, leaves) for key, item in pairs}
        return items if kind == "dict" else _made(value[0], items)
    if kind == "tuple":
        return tuple(unflatten_batch(item, leaves) for item in value)
    if kind == "list":
        return [unflatten_batch(item, leaves) for item in value]
    return value


def _made(name: str, items: dict[Any, Any]) -> Any:
    kind = class_called(name)
    if kind is not None and issubclass(kind, tuple) and kind._fields == tuple(items):  # type: ignore[attr-defined]
        return kind._make(items.values())  # type: ignore[attr-defined]
    if kind is not None and issubclass(kind, Mapping):
        return _mapping(kind, items)
    raise ModelError(
        f"the plan's batches have a {name} of {', '.join(map(str, items))}, which this process "
        f"can't import{'' if kind is None else ' as such'}; import it where planner.apply is "
        "called, or give dicts or tuples and search again"
    )


def like(value: Any, items: Iterable[Any]) -> Any:
    """Return a tuple, namedtuple, mapping or list as `value` is, of other items in order."""
    if is_namedtuple(value):
        return type(value)._make(items)
    if isinstance(value, Mapping):
        return _mapping(type(value), dict(zip(value, items, strict=True)))
    return type(value)(items)


def call_with_batch(module: Any, batch: Any) -> Any:
    """Call a module on a batch: a dict by keyword, a tuple or list by position.

    Raises ModelError where its forward does not take these arguments.
    """
    named, placed = (batch, ()) if isinstance(batch, Mapping) else ({}, batch)
    if not isinstance(placed, tuple | list):
        placed = (placed,)
    try:
        return module(*placed, **named)
    except TypeError as error:
        told = _differing_arguments(module, placed, named)
        if told and _OF_ARGUMENTS.search(str(error)):
            raise ModelError(told) from error
        raise


_OF_ARGUMENTS = re.compile(r"unexpected keyword|required \w+.* argument|positional arguments? but")
"""In Python's words: a call with other arguments than the function has."""


def _differing_arguments(module: Any, placed: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Say how a batch differs from what a module's forward takes; nothing where it does not."""
    try:
        takes = inspect.signature(module.forward)
    except (TypeError, ValueError):  # of a function that has none
        return ""
    try:
        takes.bind(*placed, **named)
    except TypeError:
        pass
    else:
        return ""
    owner = f"forward of {type(module).__name__}"
    plain = (p.replace(annotation=p.empty, default=p.empty) for p in takes.parameters.values())
    arguments = ", ".join(map(str, plain)) or "nothing"
    if not named:
        return (
            f"the batch has {len(placed)} entries, which are given by position, and {owner} takes "
            f"{arguments}; give as many as it takes, or a dict whose keys are its arguments"
        )
    others = [key for key in named if key not in takes.parameters]
    missing = [
        name
        for name, argument in takes.parameters.items()
        if name not in named
        and argument.default is argument.empty
        and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    ]
    wrong = f"{_quoted(others)} not among these" if others else f"without {_quoted(missing)}"
    return (
        f"a dict batch is given by keyword, and {owner} takes {arguments}; the batch has "
        f"{_quoted(named)}, {wrong}: rename keys or leave them out, or let forward take them"
    )


def _quoted(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in names)


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
