"""Products in 8 bits: what is multiplied, what gradients are, and torchao's recipes beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from planner.language.graph import Program
from planner.language.ops.families.products.narrow import narrow_op, scaling_of
from planner.runtime.stage.calls import narrow
from planner.runtime.stage.compiled.kernels import CompilerFailed, compiled
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.stage.weight_grads import WeightProduct, WeightQueue
from tests.runtime.stage.test_compiled import assert_equal, both, run
from tests.sharding.models import captured

ROWS, COLUMNS, INNER = 48, 32, 64


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers whose rows and columns differ in size by far."""
    torch.manual_seed(seed)
    sizes = (torch.exp2(torch.randint(-9, 9, (size,)).double()) for size in shape)
    rows, columns = sizes
    return (torch.randn(shape, dtype=torch.float64) * rows[:, None] * columns).to(dtype)


def rounded(x: Tensor, *, bits: int, largest: float, least: int, by_row: bool) -> Tensor:
    """`x` as so many bits of mantissa hold it, beside a largest value that fits: by arithmetic of
    64-bit floats alone.
    """
    top = x.abs().amax(1, keepdim=True) if by_row else x.abs().max()
    scale = torch.exp2(torch.floor(torch.log2(largest / top)))
    scaled = x * scale
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=1e-300))).clamp(min=least)
    grain = torch.exp2(exponent - bits)
    return torch.round(scaled / grain) * grain / scale


def e4m3(x: Tensor, *, by_row: bool) -> Tensor:
    return rounded(x, bits=3, largest=448, least=-6, by_row=by_row)


def e5m2(x: Tensor, *, by_row: bool) -> Tensor:
    return rounded(x, bits=2, largest=57344, least=-14, by_row=by_row)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_and_gradients_are_those_of_rounded_factors(scaling, transposed):
    """In fp64, so that nothing but the cast rounds; each product rounds its factors for itself."""
    by_row = scaling == "rowwise"
    gradient = e4m3 if by_row else e5m2
    x, weight, dy = values(ROWS, INNER), values(COLUMNS, INNER, seed=1), values(ROWS, COLUMNS)
    leaves = [x.clone(), weight.clone() if transposed else weight.t().clone(), torch.zeros(COLUMNS)]
    given = [leaf.double().requires_grad_() for leaf in leaves]
    product = WeightProduct(WeightQueue(), transposed=transposed, scaling=scaling)
    made = product(*given)
    made.backward(dy)
    expected = e4m3(x, by_row=by_row) @ e4m3(weight, by_row=by_row).t()
    of_x = gradient(dy, by_row=by_row) @ e4m3(weight.t(), by_row=by_row).t()
    of_weight = gradient(dy.t(), by_row=by_row) @ e4m3(x.t(), by_row=by_row).t()
    found = given[1].grad if transposed else given[1].grad.t()
    for ours, theirs in ((made, expected), (given[0].grad, of_x), (found, of_weight)):
        assert torch.equal(ours, theirs) or (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()
    assert torch.allclose(given[2].grad, dy.sum(0))
    # Rounded it is: 2**-4 of a factor, and not nothing.
    exact = x @ weight.t()
    assert 1e-4 < (made - exact).abs().max() / exact.abs().max() < 0.2


def test_a_scale_of_its_own_saves_rows_that_are_small_beside_others():
    x = torch.ones(ROWS, INNER, dtype=torch.float64)
    x[0] = 1e-6
    weight = torch.ones(COLUMNS, INNER, dtype=torch.float64)
    by_row, by_tensor = (
        narrow.product(x, weight, scaling)[0, 0] for scaling in ("rowwise", "tensorwise")
    )
    assert by_row == pytest.approx(INNER * 1e-6, rel=0.07)
    assert by_tensor == 0


def test_rows_that_no_kernel_takes_are_multiplied_in_16_bits():
    """The weight's gradient sums over rows: 17 of them are no whole tiles."""
    x, dy = values(17, INNER), values(17, COLUMNS)
    assert torch.equal(narrow.weight_gradient(dy, x, "rowwise"), dy.t() @ x)
    assert narrow.weight_gradient(dy[:0], x[:0], "rowwise").eq(0).all()


def test_zeros_stay_zeros_and_nan_is_seen():
    x, weight = torch.zeros(ROWS, INNER), torch.ones(COLUMNS, INNER)
    assert narrow.product(x, weight, "rowwise").eq(0).all()
    x[1, 0] = math.nan
    made = narrow.product(x, weight, "rowwise")
    assert made[1].isnan().all()
    assert made[0].eq(0).all()


def test_deferred_weight_gradients_are_the_same():
    x, weight = values(ROWS, INNER), nn.Parameter(values(COLUMNS, INNER, seed=1))
    dy, found = values(ROWS, COLUMNS), []
    for waits in (False, True):
        queue = WeightQueue()
        product = WeightProduct(queue, transposed=True, scaling="rowwise")
        weight.grad = None
        if waits:
            with queue.collecting((0, 0)):
                made = product(x, weight)
            made.backward(dy)
            assert weight.grad is None
            queue.flush((0, 0))
        else:
            product(x, weight).backward(dy)
        found.append(weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_torchaos_emulated_layer_gives_the_same_numbers(scaling):
    """Its recipe of the name, with scales that are powers of two, as its rowwise recipe has."""
    pytest.importorskip("torchao.float8")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    recipe = Float8LinearConfig.from_recipe_name(scaling)
    config = replace(recipe, emulate=True, round_scales_to_power_of_2=True)
    plain = nn.Linear(INNER, COLUMNS, bias=False, dtype=torch.bfloat16)
    theirs = Float8Linear.from_float(plain, config)
    x, dy = (values(ROWS, size, dtype=torch.bfloat16) for size in (INNER, COLUMNS))
    found = []
    for layer in (theirs, None):
        given, weight = x.clone().requires_grad_(), plain.weight
        weight.grad = None
        product = WeightProduct(WeightQueue(), transposed=True, scaling=scaling)
        made = product(given, weight) if layer is None else layer(given)
        made.backward(dy)
        found.append((made, given.grad, weight.grad))
    for other, ours in zip(*found, strict=True):
        # Sums in another order, rounded to 8 bits of mantissa.
        assert (ours - other).abs().max() <= 2**-7 * other.abs().max()


def narrow_layer(scaling: str = "rowwise") -> Program:
    """A layer of a tiny GPT in fp32 with its linear layers in 8 bits."""
    program = captured("gpt").classes[1].bind(2)
    ops = tuple(narrow_op(op, scaling) or op for op in program.ops)
    assert sum(scaling_of(op) == scaling for op in ops) == 6
    return replace(program, ops=ops)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_compiled_block_computes_and_saves_what_its_ops_do(deferred):
    program = narrow_layer()
    eager, block, queue = both(program)
    expected, eager_bytes = run(eager, program, queue, deferred=deferred)
    found, saved_bytes = run(block, program, queue, deferred=deferred)
    assert_equal(found, expected)
    assert saved_bytes == pytest.approx(eager_bytes, rel=1e-3)
    plain, _, queue = both(captured("gpt").classes[1].bind(2))
    _, plain_bytes = run(plain, program, queue)
    assert eager_bytes <= plain_bytes, "narrow copies are saved"


def test_a_program_without_a_queue_of_weight_gradients_computes_the_same():
    """As under ZeRO, where FSDP2 takes gradients."""
    program = narrow_layer("tensorwise")
    eager, _, queue = both(program)
    expected, _ = run(eager, program, queue)
    found, _ = run(to_graph_module(program, {}, torch.device("cpu")), program, queue)
    assert_equal(found, expected)


@pytest.mark.slow
def test_kernels_of_a_compiler_compute_the_same():
    program = narrow_layer()
    try:
        eager, block, queue = both(program, compiled)
    except CompilerFailed as error:
        pytest.skip(f"no compiler here: {error}")
    expected, _ = run(eager, program, queue)
    found, _ = run(block, program, queue)
    # A sum in another order may round a factor to the other neighbour in 8 bits.
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None and theirs is not None:
            gap = (ours - theirs).abs().max().item()
            assert gap <= 0.05 * max(theirs.abs().max().item(), 1e-6)
