"""Parts of templates, by hand: what each writes, how many parameters it has, what it refuses."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest

from planner.errors import PlannerError
from planner.graph import Affine, Program
from planner.templates import build_transformer, huggingface, modules
from planner.templates.gpt2 import gpt2_layer
from planner.templates.preamble import preamble, renamed_tensors
from planner.templates.routed import experts_of
from planner.templates.shared_parts import dropped, gated, layer_norm, width_of
from planner.templates.tape import Tape
from planner.templates.transformer import Adapters, Experts, Latent, Transformer

H, WIDE, SEQ, HEADS = 32, 96, 8, 4
LLAMA = Transformer(
    layers=2, hidden=H, heads=HEADS, kv_heads=2, ffn_hidden=WIDE, vocab=100, seq_len=SEQ
)
GPT = replace(
    LLAMA, kv_heads=HEADS, gated=False, norm="layer", positions="learned", bias=True, dropout=True
)
LATENT = Latent(query_rank=12, key_rank=10, rope_dim=4)
EXPERTS = Experts(number=6, per_token=2, width=24)


def written(write: Callable, *arguments, model: Transformer = LLAMA, **options) -> Program:
    tape = Tape("block", dtype=model.dtype)
    return tape.program(write(tape, *arguments, **options))


def num_params(program: Program) -> int:
    return sum(prod(program.tensor[name].shape_at(1)) for name in program.params)


def count(program: Program, target: str) -> int:
    return Counter(op.target.split(".")[1] for op in program.ops)[target]


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


# ---- Llama and its family


def test_a_layer_of_llama_has_three_matrices_and_shares_heads():
    program = written(huggingface.layer, LLAMA, dense=True)
    kv = 2 * (H // HEADS)
    assert num_params(program) == H * (H + 2 * kv) + H**2 + 3 * H * WIDE + 2 * H
    # Keys and values of 2 heads are repeated for 4 heads of queries.
    assert count(program, "expand") == 2
    whole = written(huggingface.layer, replace(LLAMA, kv_heads=HEADS), dense=True)
    assert count(whole, "expand") == 0


def test_latent_attention_multiplies_narrow_vectors():
    """Queries 32 -> 12 -> 4 heads of 8 + 4; keys and values 32 -> 10 + 4 -> 4 heads of 2 * 8."""
    model = replace(LLAMA, kv_heads=HEADS, latent=LATENT)
    expected = H * 12 + 12 * HEADS * 12 + H * (10 + 4) + 10 * HEADS * 16 + H * H
    norms = 12 + 10 + 2 * H
    for code in (huggingface, modules):
        program = written(code.layer, model, dense=True)
        assert num_params(program) == expected + norms + 3 * H * WIDE
    whole = replace(model, latent=replace(LATENT, query_rank=0))
    of_whole = expected - H * 12 - 12 * HEADS * 12 + H * HEADS * 12
    program = written(huggingface.layer, whole, dense=True)
    assert num_params(program) == of_whole + norms - 12 + 3 * H * WIDE


def test_labels_are_shifted_and_the_loss_is_in_fp32():
    program = written(huggingface.head, LLAMA)
    (loss,) = [op for op in program.ops if "cross_entropy" in op.target]
    logits, labels = (program.tensor[name] for name in loss.inputs)
    assert (logits.shape, logits.dtype) == ((Affine(SEQ), 100), "float32")
    assert (labels.shape, labels.dtype) == ((Affine(SEQ),), "int64")
    (padded,) = [op for op in program.ops if op.target == "aten.pad.default"]
    assert padded.args[1:] == ((0, 1), "constant", -100.0)
    assert num_params(program) == H + 100 * H


def test_embeddings_add_a_table_of_positions_where_they_are_learned():
    assert num_params(written(huggingface.embed, LLAMA)) == 100 * H
    assert num_params(written(huggingface.embed, GPT)) == (100 + SEQ) * H
    longer = replace(GPT, max_positions=20)
    assert num_params(written(huggingface.embed, longer)) == (100 + 20) * H
    assert num_params(written(modules.embed, longer)) == (100 + 20) * H


def test_blocks_are_called_as_the_library_does():
    assert huggingface.block_names(GPT)[1] == "transformer.h.{}"
    assert huggingface.block_names(LLAMA)[1] == "model.layers.{}"
    assert modules.block_names(GPT) == modules.block_names(LLAMA)


# ---- modules of trainers


def test_modules_have_one_product_where_libraries_have_three():
    program = written(modules.layer, LLAMA, dense=True)
    kv = 2 * (H // HEADS)
    assert num_params(program) == H * (H + 2 * kv) + H**2 + 3 * H * WIDE + 2 * H
    assert count(program, "linear") == 4
    (attention,) = [op for op in program.ops if "attention" in op.target]
    assert attention.args[4:6] == (0.0, True)
    assert dict(attention.kwargs) == {"enable_gqa": True}


def test_attention_without_a_kernel_of_its_own_writes_its_scores():
    program = written(modules.layer, replace(GPT, fused_attention=False), dense=True)
    assert [count(program, name) for name in ("matmul", "softmax", "linear")] == [2, 1, 4]
    # Of the weights of attention and of each half.
    assert count(program, "dropout") == 3
    (softmax,) = [op for op in program.ops if op.target.startswith("aten.softmax")]
    assert program.tensor[softmax.outputs[0]].shape == (Affine(1), HEADS, SEQ, SEQ)
    assert num_params(program) == 4 * H**2 + 2 * H * WIDE + 3 * H + WIDE + 2 * 2 * H


def test_adapters_add_their_rank_times_the_widths_they_join():
    model = replace(LLAMA, adapters=Adapters(rank=3))
    plain = num_params(written(modules.layer, LLAMA, dense=True))
    kv = 2 * (H // HEADS)
    more = 3 * (H + H + 2 * kv) + 3 * (H + H)
    assert num_params(written(modules.layer, model, dense=True)) == plain + more


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_of_modules(shared):
    """6 experts of three 32 by 24 matrices, a router; shared ones as a feed-forward of 2 * 24."""
    experts = replace(EXPERTS, shared=shared)
    dense = num_params(written(modules.layer, LLAMA, dense=True)) - 3 * H * WIDE
    model = replace(LLAMA, experts=experts)
    expected = dense + 6 * 3 * H * 24 + 6 * H + 3 * H * shared * 24
    assert num_params(written(modules.layer, model, dense=False)) == expected
    assert num_params(written(modules.layer, model, dense=True)) == dense + 3 * H * WIDE


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
