"""Whose rows a mask picks, as it is told, beside the values of masks."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

from planner.capture.loops.masks import Counts, Mask, Masks
from planner.language.graph import Op, Ref, Symbol, TensorMeta
from tests.executed import executed

ROWS, EXPERTS, SEEDS = 4, 5, 800


def random_op(draw: random.Random, name: str, source: str, value: Tensor) -> Op | None:
    """An op of those that routers make masks with, on a value."""
    rank = value.dim()
    dim = draw.randrange(max(rank, 1))
    kinds = ["one_hot", "eq", "flags", "permute", "transpose", "select", "slice", "any", "sum"]
    kinds += ["flatten", "any", "sum", *["one_hot", "eq"] * 4 * (source == "picked")]
    target, args = {
        "one_hot": ("one_hot.default", (Ref(source), EXPERTS)),
        "eq": ("eq.Scalar", (Ref(source), draw.randrange(EXPERTS))),
        "flags": draw.choice(
            [("ne.Scalar", (Ref(source), 0)), ("gt.Scalar", (Ref(source), 0)),
             ("ge.Scalar", (Ref(source), 1)), ("gt.Scalar", (Ref(source), 1)),
             ("eq.Scalar", (Ref(source), 1))]
        ),
        "permute": ("permute.default", (Ref(source), tuple(draw.sample(range(rank), rank)))),
        "transpose": ("transpose.int", (Ref(source), dim, draw.randrange(max(rank, 1)))),
        "select": ("select.int", (Ref(source), dim, 0)),
        "slice": ("slice.Tensor", (Ref(source), dim, 1, 2)),
        "any": ("any.dim", (Ref(source), dim)),
        "sum": ("sum.dim_IntList", (Ref(source), tuple(d for d in range(rank) if d != dim))),
        "flatten": ("reshape.default", (Ref(source), (-1,))),
    }[draw.choice(kinds)]  # fmt: skip
    if target.startswith("one_hot") and value.dtype != torch.int64:
        return None
    if target.startswith("one_hot") and value.numel() and value.max() >= EXPERTS:
        return None
    if target.startswith("select") and rank and args[1] < rank:
        args = (args[0], args[1], draw.randrange(value.shape[args[1]]) if value.numel() else 0)
    return Op(name=name, target=f"aten.{target}", args=args, outputs=(name,))


def expected(mask: Mask, place: tuple[int, ...], picked: Tensor) -> bool:
    """Whether the expert that an entry is about was chosen, by the names of the mask's dims."""
    at = dict(zip(mask.dims, place, strict=True))
    expert = mask.expert if mask.expert is not None else at["e"]
    row, choice = at.get("r"), at.get("k")
    if "n" in at:
        row, choice = divmod(at["n"], picked.shape[1])
    choices = picked[row] if choice is None else picked[row, choice : choice + 1]
    return expert in choices.tolist()


def test_what_is_told_of_masks_is_what_their_values_are():
    seen = {"rows": 0, "choices": 0, "experts": 0, "flat": 0, "counts": 0}
    for seed in range(SEEDS):
        draw = random.Random(seed)
        choices = draw.choice([1, 2, 3])
        scores = torch.rand(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
        values = {"scores": scores, "top": scores.topk(choices).values}
        topk = Op(
            name="top", target="aten.topk.default", args=(Ref("scores"), choices),
            outputs=("top", "picked"),
        )  # fmt: skip
        values["picked"] = picked = scores.topk(choices).indices
        tensors = {n: meta_of(n, value) for n, value in values.items()}
        masks = Masks(tensors)
        masks.look(topk)
        names = ["picked"]
        for number in range(8):
            name = f"t{number}"
            source = draw.choice([*names[-3:], names[-1]])
            op = random_op(draw, name, source, values[source])
            try:
                made = None if op is None else executed([op], {source: values[source]})[name]
            except (RuntimeError, IndexError):
                continue  # no such dim, say
            if op is None or made is None or made.numel() == 0:
                continue
            values[name], tensors[name] = made, meta_of(name, made)
            masks.look(op)
            names.append(name)
            known = masks.known.get(name)
            if isinstance(known, Counts):
                of_all = torch.bincount(picked.flatten(), minlength=EXPERTS)
                same = torch.equal(made.double(), of_all.double()) or torch.equal(
                    made != 0, of_all != 0
                )
                assert same, (seed, op)
                seen["counts"] += 1
            if isinstance(known, Mask):
                for place in itertools.product(*map(range, made.shape)):
                    assert bool(made[place]) == expected(known, place, picked), (seed, op, known)
                seen["flat"] += "n" in known.dims
                seen["experts"] += known.expert is None
                seen["choices"] += "k" in known.dims
                seen["rows"] += known.dims == ("r",)
    assert min(seen.values()) > 20, seen


def meta_of(name: str, value: Tensor) -> TensorMeta:
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorMeta(name=name, shape=tuple(value.shape), dtype=dtype, kind="activation")


def test_a_cast_is_the_same_mask():
    tensors = {
        "scores": meta_of("scores", torch.zeros(4, 5)),
        "top": meta_of("top", torch.zeros(4, 2)),
        "picked": meta_of("picked", torch.zeros(4, 2, dtype=torch.int64)),
        "is_two": meta_of("is_two", torch.zeros(4, 2, dtype=torch.bool)),
        "number": meta_of("number", torch.zeros(4, 2)),
    }
    masks = Masks(tensors)
    of = (Ref("scores"), 2)
    masks.look(Op(name="top", target="aten.topk.default", args=of, outputs=("top", "picked")))
    masks.look(Op(name="e", target="aten.eq.Scalar", args=(Ref("picked"), 2), outputs=("is_two",)))
    cast = (Ref("is_two"), Symbol("dtype", "float32"))
    masks.look(Op(name="c", target="aten.to.dtype", args=cast, outputs=("number",)))
    assert masks.mask("number") == masks.mask("is_two")
    assert masks.mask("number").expert == 2
    assert masks.mask("top") is None
