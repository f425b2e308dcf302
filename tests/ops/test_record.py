"""Records of op families: how a target finds its own, and what all of them must satisfy."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from planner.language.graph import Op, Ref
from planner.language.ops.record import (
    FOREIGN,
    ORDINARY,
    OpFamily,
    all_families,
    family_of,
    is_random,
    mutates,
    op_inside,
)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("aten.add.Tensor", "addition"),
        ("aten.view.default", "reshape"),
        ("aten.view.dtype", "reshape without sharding rule"),
        ("aten.fft_hfft2.default", "other linear algebra and transforms"),
        ("aten.linalg_svd.default", "linear algebra"),
        ("aten.uniform_.default", "random numbers of a tensor's size, in place"),
        ("aten.__and__.Tensor", "non-linear"),
        ("planner.redistribute", "redistribution"),
    ],
)
def test_a_target_finds_its_record(target, name):
    assert family_of(target).name == name


def test_what_has_no_record_is_ordinary_or_foreign():
    assert family_of("aten.never_heard_of.default") is ORDINARY
    assert family_of("planner.autograd_function.default") is ORDINARY
    assert family_of("flash_attn.forward.default") is FOREIGN
    assert not FOREIGN.recomputed


def test_an_op_in_place_writes_draws_and_is_never_sharded():
    drawn = Op(name="u", target="aten.uniform_.default", args=(Ref("x"),), outputs=("u",))
    added = Op(name="a", target="aten.add_.Tensor", args=(Ref("x"), 1), outputs=("a",))
    assert (is_random(drawn), mutates(drawn)) == (True, True)
    assert (is_random(added), mutates(added)) == (False, True)
    assert family_of(added.target).shard == ()


@pytest.mark.parametrize(
    ("target", "args", "draws"),
    [
        ("aten.scaled_dot_product_attention.default", ("q", "k", "v", None, 0.1), True),
        ("aten.scaled_dot_product_attention.default", ("q", "k", "v"), False),
        ("planner.causal_attention", ("q", "k", "v", 0.5), True),
        ("aten.lstm.input", ("x", "h", "w", True, 2, 0.5), True),
        ("aten.lstm.input", ("x", "h", "w", True, 2, 0.0), False),
        ("aten.randn_like.default", ("x",), True),
        ("aten.matmul.default", ("x", "y"), False),
    ],
)
def test_what_draws(target, args, draws):
    assert is_random(Op(name="x", target=target, args=args, outputs=("x",))) == draws


def test_the_op_inside_an_own_random_stream():
    op = Op(
        name="d",
        target="planner.with_own_random_stream",
        args=("aten.dropout.default", "tp", Ref("x"), 0.5, True),
        outputs=("d",),
    )
    assert op_inside(op) == Op(
        name="d", target="aten.dropout.default", args=(Ref("x"), 0.5, True), outputs=("d",)
    )


def exists(target: str) -> bool:
    _, name, overload = (target + ".").split(".")[:3]
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and (not overload or overload in packet.overloads())


def test_every_aten_target_is_an_op_of_torch():
    """A misspelt target would never be found."""
    named = [t for f in all_families() for t in f.targets if t.startswith("aten.")]
    assert not [t for t in named if not t.endswith("*") and not exists(t)]


def test_every_field_of_a_record_is_documented():
    text = inspect.getsource(OpFamily)
    for field in dataclasses.fields(OpFamily):
        after = text.split(f"\n    {field.name}: ", 1)[1]
        assert after.partition("\n\n")[0].count('"""') == 2, field.name
