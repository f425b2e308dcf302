"""Parts of templates, by hand: what each writes, how many parameters it has, what it refuses."""

from dataclasses import replace
from math import prod

import pytest

from planner.errors import PlannerError
from planner.language.graph import Affine, Program
from planner.language.templates import build_transformer
from planner.language.templates.gpt2 import gpt2_layer
from planner.language.templates.preamble import preamble, renamed_tensors
from planner.language.templates.routed import experts_of
from planner.language.templates.shared_parts import dropped, gated, layer_norm, width_of
from planner.language.templates.tape import Tape
from planner.language.templates.transformer import Experts
from tests.templates.written import (
    EXPERTS,
    GPT,
    HEADS,
    LATENT,
    LLAMA,
    SEQ,
    WIDE,
    H,
    count,
    num_params,
    written,
)

# ---- GPT-2 of the transformers library


def test_a_layer_of_gpt2():
    """12 h^2 + 13 h where the feed-forward is 4 h: here 4 h^2 + 4 h of attention, 2 h w + w + h of
    the feed-forward, two norms of 2 h; four products with a bias each."""
    program = written(gpt2_layer, GPT)
    attention, feed_forward = 4 * H**2 + 4 * H, 2 * H * WIDE + WIDE + H
    assert num_params(program) == attention + feed_forward + 2 * 2 * H
    assert count(program, "addmm") == 4
    # Attention's own dropout is inside its kernel; each half of the layer has one.
    assert count(program, "dropout") == 2
    assert program.tensor[program.outputs[0]].shape == (Affine(1), SEQ, H)
    (attention,) = [op for op in program.ops if "attention" in op.target]
    assert dict(attention.kwargs) == {"scale": (H / HEADS) ** -0.5}
    query, key, value = (program.tensor[name].shape for name in attention.inputs[:3])
    assert query == key == value == (Affine(1), HEADS, SEQ, H // HEADS)


def test_nothing_before_a_first_layer_needs_a_gradient():
    program = written(gpt2_layer, GPT, differentiable=False)
    assert not program.tensor[program.inputs[0]].requires_grad
    assert program.tensor[program.outputs[0]].requires_grad


# ---- experts of the transformers library


def routed(experts: Experts) -> Program:
    model = replace(LLAMA, experts=experts)
    tape = Tape("block", dtype=model.dtype)
    x = tape.input(Affine(1), SEQ, H)
    return tape.program(experts_of(tape, model, experts, x))


def test_mixtral_s_router_is_a_softmax_over_all_experts():
    program = routed(EXPERTS)
    assert num_params(program) == 6 * 3 * H * 24 + 6 * H
    assert count(program, "topk") == 1
    assert program.tensor[program.outputs[0]].shape == (Affine(1), SEQ, H)
    grouped = [op for op in program.ops if "grouped_mm" in op.target]
    # A row for each token and each of its experts.
    rows = [program.tensor[op.outputs[0]].shape for op in grouped]
    assert rows == [(Affine(2 * SEQ), 2 * 24), (Affine(2 * SEQ), H)]


def test_deepseek_s_router_picks_groups_and_then_experts():
    """The two best of each group say which half of the groups is left; a correction is no
    weight."""
    program = routed(replace(EXPERTS, groups=3, shared=1))
    trained = sum(
        prod(program.tensor[name].shape_at(1))
        for name in program.params
        if program.tensor[name].kind == "param"
    )
    assert trained == 6 * 3 * H * 24 + 6 * H + 3 * H * 24
    picks = [op.args[1] for op in program.ops if "topk" in op.target]
    assert picks == [2, 1, 2]
    (shift,) = [program.tensor[n] for n in program.params if program.tensor[n].kind == "buffer"]
    assert (shift.shape, shift.dtype) == ((6,), "float32")


# ---- shared parts


def test_parts_that_models_share():
    tape = Tape("block", dtype="bfloat16")
    x = tape.input(Affine(1), SEQ, H)
    assert width_of(x) == H
    assert gated(tape, x, 24, "mlp").shape == x.shape
    layer_norm(tape, x)
    for model in (LLAMA, GPT):
        dropped(tape, x, model)
    program = tape.program(x)
    assert num_params(program) == 3 * H * 24 + 2 * H
    # A model's code has dropout where it drops nothing, too.
    drops = [op.args[1:] for op in program.ops if "dropout" in op.target]
    assert drops == [(0.0, True), (0.1, True)]


# ---- what layers take besides


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (LLAMA, {"cos": (1, SEQ, 8), "sin": (1, SEQ, 8)}),
        (replace(LLAMA, latent=LATENT, kv_heads=HEADS), {"cos": (1, SEQ, 4), "sin": (1, SEQ, 4)}),
        (
            replace(LLAMA, code="huggingface"),
            {"cos": (1, SEQ, 8), "sin": (1, SEQ, 8)},
        ),
        (replace(GPT, code="huggingface"), {}),
        (GPT, {"positions": (1, SEQ)}),
        (replace(GPT, positions="none"), {}),
    ],
)
def test_layers_take_what_sizes_alone_tell(model, outputs):
    program = preamble(model)
    assert {name: program.tensor[name].shape for name in program.outputs} == outputs
    assert program.params == (("inv_freq",) if "cos" in outputs else ())


def test_renamed_tensors_are_renamed_everywhere():
    program = renamed_tensors(preamble(LLAMA), {"cos": "c", "inv_freq": "rates"})
    assert program.outputs == ("c", "sin")
    assert program.params == ("rates",)
    assert any("rates" in op.inputs for op in program.ops)
    made = {name for op in program.ops for name in op.outputs}
    assert "c" in made
    assert "cos" not in made


# ---- what is refused


def test_the_width_of_a_head_is_given_or_follows():
    assert LLAMA.head_width == H // HEADS
    assert replace(LLAMA, head_dim=5).head_width == 5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"heads": 3, "kv_heads": 3}, "heads=3 does not divide hidden=32; give head_dim"),
        ({"latent": LATENT, "positions": "learned"}, "give positions='rotary'"),
        ({"code": "huggingface", "positions": "learned"}, "with norm='rms' is Llama's"),
        ({"code": "huggingface", "positions": "none"}, "with norm='rms' is Llama's"),
        ({"code": "huggingface", "gated": False}, "with norm='rms' is Llama's"),
        ({"code": "huggingface", "norm": "layer"}, "with norm='layer' is GPT-2's"),
        ({"code": "huggingface", "norm": "layer", "gated": False, "positions": "learned"},
         "as many kv_heads as heads"),
    ],
)  # fmt: skip
def test_what_no_template_is_written_for_is_told(changes, told):
    with pytest.raises(PlannerError, match=told):
        build_transformer(replace(LLAMA, **changes))
