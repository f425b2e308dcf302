"""M25: a table's gradient stays rows only where lookups of sparse=True are all that reads it."""

from planner.capture.blocks import RawOp
from planner.capture.reading.sparse import dense_where_mixed
from planner.language.graph import Op, Ref, TensorMeta


def tensors(**requires_grad: bool) -> dict[str, TensorMeta]:
    params = {
        name: TensorMeta(
            name=name, shape=(8, 4), dtype="float32", kind="param", requires_grad=trained
        )
        for name, trained in requires_grad.items()
    }
    given = {
        name: TensorMeta(name=name, shape=(3,), dtype="int64", kind="input")
        for name in ("ids", "offsets", "x")
    }
    return params | given


def lookup(table: str, *, sparse: bool = True, by_frequency: bool = False) -> RawOp:
    args = (Ref(table), Ref("ids"), -1, by_frequency, sparse)
    return raw("aten.embedding.default", args, (table, "ids"))


def raw(target: str, args: tuple, inputs: tuple[str, ...]) -> RawOp:
    op = Op(name="op", target=target, args=args, outputs=("made",))
    assert op.inputs == inputs
    return RawOp(op=op, module="")


def sparse_flags(ops: list[RawOp], **requires_grad: bool) -> list[bool]:
    made = dense_where_mixed(ops, tensors(**requires_grad))
    return [bool(each.op.args[4]) for each in made if each.op.target.startswith("aten.embedding")]


def test_lookups_alone_stay_sparse():
    assert sparse_flags([lookup("a"), lookup("a")], a=True) == [True, True]


def test_a_second_reader_makes_all_of_a_tables_lookups_dense_and_no_other_tables():
    tied = raw("aten.linear.default", (Ref("x"), Ref("a")), ("x", "a"))
    ops = [lookup("a"), lookup("b"), tied]
    assert sparse_flags(ops, a=True, b=True) == [False, True]


def test_a_dense_lookup_of_the_same_table_makes_all_dense():
    assert sparse_flags([lookup("a"), lookup("a", sparse=False)], a=True) == [False, False]


def test_gradients_scaled_by_frequency_and_frozen_tables_are_dense():
    assert sparse_flags([lookup("a", by_frequency=True)], a=True) == [False]
    assert sparse_flags([lookup("a")], a=False) == [False]


def test_bags_are_dense():
    args = (Ref("a"), Ref("ids"), Ref("offsets"), False, 0, True)
    bag = raw("aten.embedding_bag.default", args, ("a", "ids", "offsets"))
    (made,) = dense_where_mixed([bag], tensors(a=True))
    assert made.op.args == (*args[:5], False)
