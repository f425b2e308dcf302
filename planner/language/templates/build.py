"""The chain of a template: an embedding, layers of one or two classes, a head; ahead of them those
of an encoder, if there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from planner.errors import PlannerError
from planner.language.graph import Affine, Block, ModelGraph, Program, TensorMeta
from planner.language.templates import huggingface, modules
from planner.language.templates.preamble import preamble
from planner.language.templates.tape import Tape, Value
from planner.language.templates.transformer import Transformer

STREAM, MEMORY = "x", "memory"
"""What the block before makes; and what an encoder makes, which a decoder's layers take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClass:
    """A kind of block: its program, what its parameters are called, its layout on tp."""

    name: str
    """What its blocks are called, with {} for the number of a layer."""
    program: Program
    """The ops."""
    takes: tuple[str, ...]
    """What its inputs are: `STREAM`, `MEMORY`, else a value of the preamble or of the batch."""
    places: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    """How inputs, parameters and outputs lie on tp where it is split as usual (`tape`)."""
    shardings: tuple[tuple[str, str], ...]
    """Of each op, the same."""
    makes: str = STREAM
    """What its output is to later blocks."""
    shared: Mapping[int, int] = field(default_factory=dict)
    """Which of its parameters are the first block's, by their positions in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A template's graph and its classes, in the graph's order."""

    graph: ModelGraph
    """The model."""
    classes: tuple[BlockClass, ...]
    """Its classes of blocks."""


def build_transformer(model: Transformer) -> ModelGraph:
    """Return the graph of a model, as a capture of it would be."""
    return template_of(model).graph


def build_experts(model: Transformer) -> Program:
    """Return the program of a layer's experts alone, as trainers of large models write them."""
    return _written("experts", model, modules.experts_alone, ("x",)).program


@lru_cache(maxsize=256)
def template_of(model: Transformer) -> Template:
    """Return the graph of a model with the usual layouts of its classes."""
    if model.adapters and (model.code == "huggingface" or model.latent):
        raise PlannerError(
            "adapters are written for ordinary attention in code of modules; leave adapters, "
            "code='huggingface' or latent out"
        )
    _check_written(model)
    code = huggingface if model.code == "huggingface" else modules
    values = preamble(model)
    dense_first = model.experts.dense_layers if model.experts else 0
    names = code.block_names(model)
    classes: list[BlockClass] = []
    order: list[int] = []
    takes: tuple[str, ...] = (STREAM,)
    embedding = _written(names[0], model, code.embed, ("input_ids", "positions"))
    if model.encoder is not None:
        classes, order = _encoder(model)
        takes = (STREAM, MEMORY)
        embedding = _written(f"decoder.{names[0]}", model, code.embed, ("decoder_ids", "positions"))
        own = embedding.program.params
        embedding = replace(embedding, shared={index: index for index in range(len(own))})
    order.append(len(classes))
    classes.append(embedding)
    takes += values.outputs
    # Where the embedding is frozen, nothing that the first layer takes needs a gradient.
    kinds_of_layers = [
        (index < dense_first, index > 0 or model.adapters is None)
        for index in range(model.layers + model.ahead)
    ]
    for dense, differentiable in dict.fromkeys(kinds_of_layers):

        def write(
            tape: Tape,
            model: Transformer,
            dense: bool = dense,
            differentiable: bool = differentiable,
        ) -> Value:
            return code.layer(tape, model, dense=dense, differentiable=differentiable)

        order += [len(classes)] * kinds_of_layers.count((dense, differentiable))
        classes.append(_written(names[1], model, write, takes))
    last = _written(names[2], model, code.head, (STREAM, "labels"))
    if model.tied:
        last = replace(last, shared={len(last.program.params) - 1: 0})
    order.append(len(classes))
    classes.append(last)
    return Template(graph=_chain(model, classes, order, values), classes=tuple(classes))


def _encoder(model: Transformer) -> tuple[list[BlockClass], list[int]]:
    """Return the classes of a model's encoder, and the order of their blocks."""
    assert model.encoder is not None
    layers = model.encoder.layers
    own = replace(model, layers=layers, seq_len=model.encoder.seq_len, encoder=None, sees_all=True)
    names = modules.block_names(own)

    def write(tape: Tape, model: Transformer) -> Value:
        return modules.layer(tape, model, dense=True)

    embedding = _written(names[0], own, modules.embed, ("input_ids", "encoder_positions"))
    layer = _written("encoder.layers.{}", own, write, (STREAM,))
    end = _written("encoder.final_layernorm", own, modules.memory, (STREAM,))
    return [embedding, layer, replace(end, makes=MEMORY)], [0, *[1] * layers, 2]


def _check_written(model: Transformer) -> None:
    """Raise PlannerError for sizes or parts that no template is written for."""
    if model.heads % model.kv_heads:
        raise PlannerError(
            f"kv_heads={model.kv_heads} does not divide heads={model.heads}; each head of keys is "
            "shared by as many of queries"
        )
    if not model.head_dim and model.hidden % model.heads:
        raise PlannerError(
            f"heads={model.heads} does not divide hidden={model.hidden}; give head_dim"
        )
    if model.latent and model.positions != "rotary":
        raise PlannerError("latent attention turns its keys; give positions='rotary'")
    if model.encoder and (model.positions == "rotary" or model.experts or model.adapters):
        raise PlannerError(
            "an encoder is written with a table of positions, without experts and adapters; give "
            "positions='learned'"
        )
    if model.code != "huggingface":
        return
    if model.ahead:
        raise PlannerError(f"ahead={model.ahead} is of code='modules'; leave it out")
    if model.encoder or model.sees_all or model.transforms_head:
        raise PlannerError(
            "encoder, sees_all and transforms_head are of code='modules'; leave them out"
        )
    if model.norm == "rms" and not (model.gated and model.positions == "rotary"):
        raise PlannerError(
            "code='huggingface' with norm='rms' is Llama's: give gated=True and "
            "positions='rotary', or code='modules'"
        )
    if model.norm == "layer" and (
        model.gated
        or model.positions != "learned"
        or model.kv_heads != model.heads
        or model.latent
        or model.experts
    ):
        raise PlannerError(
            "code='huggingface' with norm='layer' is GPT-2's: give gated=False, "
            "positions='learned' and as many kv_heads as heads, leave latent and experts out, or "
            "give code='modules'"
        )


def _written(
    name: str,
    model: Transformer,
    write: Callable[[Tape, Transformer], Value],
    takes: Sequence[str],
) -> BlockClass:
    tape = Tape(name.format("*"), dtype=model.dtype, frozen=model.adapters is not None)
    output = write(tape, model)
    return BlockClass(
        name=name,
        program=tape.program(output),
        takes=tuple(takes[: len(tape.inputs)]),
        places=(
            tuple(value.place for value in tape.inputs),
            tuple(value.place for value in tape.params),
            (tape.left(output),),
        ),
        shardings=tuple(tape.shardings.items()),
    )


def _chain(
    model: Transformer, classes: Sequence[BlockClass], order: Sequence[int], values: Program
) -> ModelGraph:
    lengths = {"input_ids": model.seq_len, "labels": model.seq_len}
    if model.encoder is not None:
        lengths |= {"input_ids": model.encoder.seq_len, "decoder_ids": model.seq_len}
    ids = [
        TensorMeta(name=name, shape=(Affine(1), length), dtype="int64", kind="input", fqn=name)
        for name, length in lengths.items()
    ]
    held: dict[str, TensorMeta] = {n: values.tensor[n] for n in values.params}
    made: list[TensorMeta] = [values.tensor[n] for n in values.outputs]
    blocks: list[Block] = []
    numbers: Counter[str] = Counter()
    latest: dict[str, str] = {}
    for index, kind in enumerate(order):
        of = classes[kind]
        block_name = of.name.format(numbers[of.name])
        numbers[of.name] += 1
        names = []
        for position, own in enumerate(of.program.params):
            path = of.program.tensor[own].fqn
            fqn = f"{block_name}.{path}" if "{}" in of.name else path
            if position in of.shared:
                names.append(blocks[0].params[of.shared[position]])
                continue
            name = fqn.replace(".", "_")
            held[name] = replace(of.program.tensor[own], name=name, fqn=fqn)
            names.append(name)
        (own_output,) = of.program.outputs
        output = "loss" if index == len(order) - 1 else f"x_{index}"
        made.append(replace(of.program.tensor[own_output], name=output))
        blocks.append(
            Block(
                index=index,
                name=block_name,
                class_index=kind,
                inputs=tuple(latest.get(name, name) for name in of.takes),
                params=tuple(names),
                outputs=(output,),
            )
        )
        latest[of.makes] = output
    return ModelGraph(
        name=f"transformer of {model.layers} layers",
        tensors=(*ids, *held.values(), *made),
        batch_inputs=tuple(lengths),
        batch_tree={"dict": tuple((name, {"tensor": name}) for name in lengths)},
        preamble=values,
        blocks=tuple(blocks),
        classes=tuple(of.program for of in classes),
        loss="loss",
    )
