"""Products in 8 bits: what is multiplied, what gradients are, and torchao's recipes beside them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from planner.errors import PlanError
from planner.language.graph import Program
from planner.language.ops.families.products.narrow import narrow_op, scales_in_tiles, scaling_of
from planner.runtime.stage.calls import narrow
from planner.runtime.stage.compiled.kernels import CompilerFailed, compiled
from planner.runtime.stage.program_fx import to_graph_module
from planner.runtime.stage.weight_grads import WeightProduct, WeightQueue
from tests.runtime.stage.test_compiled import assert_equal, both, run
from tests.sharding.models import captured

ROWS, COLUMNS, INNER = 96, 32, 64


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
    # (Rows of more dims are those of the last.)
    if x.dim() > 2:
        flat = rounded(x.flatten(0, -2), bits=bits, largest=largest, least=least, by_row=by_row)
        return flat.view(x.shape)
    top = x.abs().amax(1, keepdim=True) if by_row else x.abs().max()
    scale = torch.exp2(torch.floor(torch.log2(largest / top)))
    scaled = x * scale
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=1e-300))).clamp(min=least)
    grain = torch.exp2(exponent - bits)
    return torch.round(scaled / grain) * grain / scale


def e4m3(x: Tensor, *, by_row: bool) -> Tensor:
    return rounded(x, bits=3, largest=448, least=-6, by_row=by_row)


def mxfp8(x: Tensor) -> Tensor:
    """Blocks of 32 neighbours in a row, each scaled by itself."""
    return e4m3(x.unflatten(1, (-1, 32)), by_row=True).flatten(1)


def e5m2(x: Tensor, *, by_row: bool) -> Tensor:
    return rounded(x, bits=2, largest=57344, least=-14, by_row=by_row)


FORMS = {
    "rowwise": (partial(e4m3, by_row=True),) * 2,
    "tensorwise": (partial(e4m3, by_row=False), partial(e5m2, by_row=False)),
    "blocks": (mxfp8,) * 2,
}
"""How what enters a layer is rounded, and what comes back."""


@pytest.mark.parametrize("scaling", FORMS)
@pytest.mark.parametrize("transposed", [True, False])
def test_products_and_gradients_are_those_of_rounded_factors(scaling, transposed):
    """In fp64, so that nothing but the cast rounds; each product rounds its factors for itself."""
    narrow, gradient = FORMS[scaling]
    x, weight, dy = values(ROWS, INNER), values(COLUMNS, INNER, seed=1), values(ROWS, COLUMNS)
    leaves = [x.clone(), weight.clone() if transposed else weight.t().clone(), torch.zeros(COLUMNS)]
    given = [leaf.double().requires_grad_() for leaf in leaves]
    product = WeightProduct(WeightQueue(), transposed=transposed, scaling=scaling)
    made = product(*given)
    made.backward(dy)
    expected = narrow(x) @ narrow(weight).t()
    of_x = gradient(dy) @ narrow(weight.t()).t()
    of_weight = gradient(dy.t()) @ narrow(x.t()).t()
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


def test_a_scale_a_block_saves_numbers_that_are_small_beside_others_of_their_row():
    x = torch.ones(ROWS, INNER, dtype=torch.float64)
    x[:, :32] = 1e-6
    weight = torch.ones(COLUMNS, INNER, dtype=torch.float64)
    weight[:, 32:] = 0
    by_block, by_row = (
        narrow.product(x, weight, scaling)[0, 0] for scaling in ("blocks", "rowwise")
    )
    assert by_block == pytest.approx(32 * 1e-6, rel=0.07)
    assert by_row == 0


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (96, 2), (300, 9)])
def test_scales_of_blocks_lie_as_tensor_cores_read_them(rows, blocks):
    """Number by number, by the formula of cuBLAS's manual."""
    scales = torch.randint(1, 255, (rows, blocks), dtype=torch.uint8)
    found = narrow.in_order_of_tensor_cores(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert len(found) == scales_in_tiles(rows, 32 * blocks)
    expected = torch.zeros_like(found)
    along = -(-blocks // 4)
    for row, block in itertools.product(range(rows), range(blocks)):
        tile = (row // 128) * along + block // 4
        inside = (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
        expected[512 * tile + inside] = scales[row, block]
    assert torch.equal(found, expected)


def test_numbers_that_scales_undo_are_powers_of_two_that_8_bits_hold():
    _, back = narrow.cast_blocks(values(ROWS, INNER, dtype=torch.bfloat16))
    assert torch.equal(back.to(torch.float8_e8m0fnu).float(), back)


@pytest.mark.parametrize(
    ("capability", "scaling", "complaint"),
    [
        ((8, 0), "rowwise", "has compute capability 8.0, and products in 8-bit floats need 8.9"),
        ((9, 0), "tensorwise", ""),
        ((9, 0), "blocks", "floats with a scale for 32 neighbours need 10.0 .Blackwell. or more"),
        ((10, 0), "blocks", ""),
    ],
)
def test_devices_without_such_products_are_refused(monkeypatch, capability, scaling, complaint):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda", 0)
    if not complaint:
        assert narrow.check_device(device, scaling) == ""
        return
    with pytest.raises(PlanError, match=complaint):
        narrow.check_device(device, scaling)


def test_torchaos_format_of_blocks_has_the_same_numbers():
    """Its scales of the way that rounds up, where no number exceeds the largest."""
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    way = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
    x = values(ROWS, INNER, dtype=torch.bfloat16)
    scales, theirs = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, way)[:2]
    ours, back = narrow.cast_blocks(x)
    assert torch.equal(ours.float(), theirs.view(ours.shape).float())
    assert torch.equal(back, scales.float().view(back.shape))


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
