"""`planner.register_rule`: a user's op with a rule of its own in the model file.

It is sharded and priced like any other, also where the capture was kept. `tests/cli` has it in
commands and their ranks, where a wrong rule is found.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import planner as door
from planner.capture.source.capture_cache import load_graph
from planner.errors import LayoutError
from planner.language.graph import Op, Ref, TensorMeta
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.record import FOREIGN, family_of
from planner.language.ops.registry import local_ops, strategies
from planner.language.ops.users import has_user_rule, rule_digests, rules, unregister_rule
from tests.ops.users.own_ops import ATTEND, PROJECT, model_file


@pytest.fixture(autouse=True)
def as_before():
    """Rules of a test are gone after it."""
    yield
    for target in list(rules._RULES):
        unregister_rule(target)


def call(*shapes: tuple[int, ...], made: tuple[int, ...], more=()) -> tuple[Op, dict]:
    """A call of ``mine.op`` on tensors of these shapes."""
    tensors = {f"x{i}": shape for i, shape in enumerate(shapes)} | {"y": made}
    metas = {
        name: TensorMeta(
            name=name, shape=shape, dtype="float32", kind="activation", requires_grad=True
        )
        for name, shape in tensors.items()
    }
    args = (*(Ref(f"x{i}") for i in range(len(shapes))), *more)
    return Op(name="op", target="mine.op.default", args=args, outputs=("y",)), metas


def offered(op: Op, metas: dict) -> set[str]:
    return {str(sharding) for sharding in strategies(op, metas, 2)}


# ------------------------------------------------------------------------------ what a rule says


def test_a_product_with_a_bias():
    door.register_rule("mine::op", "...d, df, +f -> ...f")
    op, metas = call((2, 8, 16), (16, 32), (32,), made=(2, 8, 32))
    assert offered(op, metas) == {
        "R,R,R->R", "S(0),R,R->S(0)", "S(1),R,R->S(1)", "S(2),S(0),P->P", "R,S(1),S(0)->S(2)",
    }  # fmt: skip
    # 2 * 16 samples * 16 * 32, and as much for the gradient of each factor.
    assert op_work(op, metas).flop == 2 * 16 * 16 * 32
    assert backward_work(op, metas).flop == 2 * 2 * 16 * 16 * 32
    assert family_of(op.target).arithmetic == "matmul"


def test_a_function_of_the_arguments():
    def dims(x, mode, scale=1.0):
        assert (x.shape, x.dtype) == ((2, 8, 16), "float32")
        return {"rows": "bs_ -> bs_", "all": "bsd -> bsd"}.get(mode)

    door.register_rule("mine.op", dims, flop=lambda x, mode: 5 * x.numel())
    op, metas = call((2, 8, 16), made=(2, 8, 16), more=("rows",))
    assert offered(op, metas) == {"R->R", "S(0)->S(0)", "S(1)->S(1)"}
    assert op_work(op, metas).flop == 5 * 256
    assert offered(*call((2, 8, 16), made=(2, 8, 16), more=("none",))) == {"R->R"}


def test_what_a_function_of_the_users_raises_is_told():
    door.register_rule("mine.op", lambda x: x.size)
    with pytest.raises(LayoutError, match=r"rule of mine\.op failed in <lambda>: AttributeError"):
        offered(*call((2, 8), made=(2, 8)))


def test_counts_that_go_with_a_letter_are_divided():
    torch.library.define("mine_counted::op", "(Tensor x, int heads) -> Tensor")
    door.register_rule("mine_counted::op", "bh -> bh", divided={"heads": "h"})
    op, metas = call((2, 24), made=(2, 24), more=(6,))
    op = Op(name="op", target="mine_counted.op.default", args=op.args, outputs=op.outputs)
    assert {str(s) for s in strategies(op, metas, 4)} == {"R->R"}, "4 does not divide 6 heads"
    by_text = {str(s): s for s in strategies(op, metas, 2)}
    local = {
        text: local_ops(op, by_text[text], metas, axis="tp", axis_size=2).ops[0].args[1]
        for text in ("S(1)->S(1)", "S(0)->S(0)")
    }
    assert local == {"S(1)->S(1)": 3, "S(0)->S(0)": 6}


def test_a_rule_given_again_replaces_the_other():
    op, metas = call((2, 8), made=(2, 8))
    assert family_of(op.target) is FOREIGN
    door.register_rule("mine::op", "b_ -> b_")
    first = rule_digests()
    door.register_rule("mine::op", "b_ -> b_")
    assert rule_digests() == first
    assert offered(op, metas) == {"R->R", "S(0)->S(0)"}
    door.register_rule("mine::op", "bd -> bd")
    assert rule_digests() != first, "kept answers of searches differ by it"
    assert offered(op, metas) == {"R->R", "S(0)->S(0)", "S(1)->S(1)"}


@pytest.mark.parametrize(
    ("op", "dims", "more", "told"),
    [
        ("aten::linear", "bd, fd -> bf", {}, "in two op families"),
        ("no op", "b -> b", {}, "is no op; give an op of torch.library"),
        ("mine::op", "b", {}, "no '->'"),
        ("mine::none", "bh -> bh", {"divided": {"n": "h"}}, "define it before its rule"),
        ("aten::dropout", "bh -> bh", {"divided": {"n": "h"}}, "no argument n"),
    ],
)
def test_what_is_refused(op, dims, more, told):
    with pytest.raises(ValueError, match=told):
        door.register_rule(op, dims, **more)


IN_A_NEW_PROCESS = """
import sys
from planner.capture.source.capture_cache import load_graph
from planner.language.ops.users import has_user_rule
import planner.capture.module

def refuse(*given, **named):
    raise AssertionError("captured again")

planner.capture.module.capture_module = refuse
load_graph(sys.argv[1])
assert has_user_rule("mine_kept.project.default")
"""


def test_a_kept_capture_brings_its_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.py"
    path.write_text(model_file("mine_kept", PROJECT, ATTEND))
    load_graph(path)
    assert has_user_rule("mine_kept.project.default")
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, str(path)], check=True)
