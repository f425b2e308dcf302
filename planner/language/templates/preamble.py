"""What layers share: tables of rotary positions, and positions. They follow from sizes alone."""

from __future__ import annotations

from dataclasses import replace

from planner.language.graph import Program, Symbol
from planner.language.templates.tape import Tape, Value
from planner.language.templates.transformer import Transformer


def preamble(model: Transformer) -> Program:
    """Return the program of the values that layers take besides what goes from one to the next."""
    tape = Tape("preamble", dtype="float32")
    outputs: list[tuple[str, Value]] = []
    s = model.seq_len
    positions = written_positions(tape, s)
    if model.positions == "rotary":
        width = model.latent.rope_dim if model.latent else model.head_width
        tape.module = "rotary_emb"
        rates = tape.param("inv_freq", width // 2, dtype="float32", kind="buffer")
        angles = tape.pointwise(
            "aten.mul.Tensor", tape.cast(tape.unsqueeze(positions, 2), "float32"), rates
        )
        angles = tape.cat((angles, angles))
        for name in ("cos", "sin"):
            table = tape.cast(tape.pointwise(f"aten.{name}.default", angles), model.dtype)
            outputs.append((name, table))
    if model.code != "huggingface" and model.positions == "learned":
        outputs.append(("positions", positions))
        if model.encoder is not None:
            seen = written_positions(tape, model.encoder.seq_len)
            outputs.append(("encoder_positions", seen))
    program = tape.program(*(value for _, value in outputs))
    names = {value.meta.name: name for name, value in outputs}
    names |= dict(zip(program.params, ("inv_freq",), strict=False))
    return renamed_tensors(program, names)


def written_positions(tape: Tape, seq_len: int) -> Value:
    """Write the positions of a sequence, (1, seq_len)."""
    counted = tape.call(
        "aten.arange.default",
        seq_len,
        shapes=((seq_len,),),
        dtypes=("int64",),
        kwargs=(("device", Symbol("device")), ("pin_memory", False)),
    )[0]
    return tape.unsqueeze(tape.pointwise("aten.add.Tensor", counted, 0), 0)


def renamed_tensors(program: Program, names: dict[str, str]) -> Program:
    """Return a program with other names for some of its tensors."""

    def rename(name: str) -> str:
        return names.get(name, name)

    return replace(
        program,
        params=tuple(map(rename, program.params)),
        outputs=tuple(map(rename, program.outputs)),
        tensors=tuple(replace(t, name=rename(t.name)) for t in program.tensors),
        ops=tuple(op.rename(rename) for op in program.ops),
    )
