"""Random losses of a tiny model, each as the text of a model file.

A program is made by a seed: a trunk of some hundred parameters, heads, and a loss that
is put together by `loss_grammar`. Its `tags` name what was taken, so that programs which fail can
be sorted.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from tests.across import loss_grammar as grammar
from tests.across.loss_grammar import Alternatives

HEADER = """\
import torch
from torch import nn
from torch.nn import functional as F

TOKENS, CLASSES, WIDTH, LENGTH = 9, 5, 4, 5
COUNTS = [5, 0, 1, 4, 0, 0, 2, 5]  # of labels that count, by sample


class Ctc(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def forward(self, log_probs, targets, lengths):
        inputs = torch.full_like(lengths, LENGTH)
        return F.ctc_loss(log_probs, targets, inputs, lengths, reduction=self.reduction)


class Chosen(nn.Module):
    def forward(self, losses, mask):
        return losses[mask].mean()


def everything(size, seed=0):
    g = torch.Generator().manual_seed(seed)
    real = {"generator": g, "dtype": torch.float64}
    counts = torch.tensor([COUNTS[(i + seed) % 8] for i in range(size)])
    others = torch.tensor([COUNTS[(2 * i + seed + 3) % 8] for i in range(size)])
    place = torch.arange(LENGTH)[None]
    labels = torch.randint(CLASSES, (size, LENGTH), generator=g)
    tags = torch.randint(1, CLASSES, (size, LENGTH), generator=g)
    classes = torch.randint(CLASSES, (size,), generator=g)
    target = torch.randn(size, LENGTH, **real)
    known = place >= LENGTH - others[:, None]
    return {
        "ids": torch.randint(TOKENS, (size, LENGTH), generator=g),
        "x": torch.randn(size, LENGTH, WIDTH, **real),
        "labels": labels.masked_fill(place >= counts[:, None], -100),
        "tags": tags.masked_fill(~known, 0),
        "classes": classes.masked_fill(counts == 1, -100),
        "mask": (place < others[:, None]).double(),
        "keep": known,
        "lengths": counts.clamp(min=1),
        "weights": 0.1 + torch.rand(size, **real) * (1 + counts),
        "target": target,
        "gaps": target.masked_fill(~known, float("nan")),
        "rewards": torch.randn(size, **real),
        "old": -1.5 + 0.3 * torch.randn(size, LENGTH, **real),
        "num_items": (place < counts[:, None]).sum(),
        "scale": torch.tensor(0.7, dtype=torch.float64),
    }

"""

_OF_BATCH = set(re.findall(r'^        "(\w+)":', HEADER, re.MULTILINE))
_ALONE = {"num_items", "scale"}
"""Tensors of the batch that are no samples'."""


_MAY_COINCIDE = grammar.MAY_COINCIDE | grammar.NAMED_ALL_THE_SAME


@dataclass(frozen=True)
class RandomProgram:
    """A model file, and what its loss is made of.

    Attributes:
        seed: by which it was made.
        source: its text.
        tags: the alternatives that were taken.
        may_coincide: whether parts may differ on other batches, whatever these show (a clamp), or
            it is known that they are named in vain.
    """

    seed: int
    source: str
    tags: tuple[str, ...]
    may_coincide: bool


def random_program(seed: int) -> RandomProgram:
    """Return the program of a seed: one in eight has its loss beside the model, one in eight says
    what parts count.
    """
    rng = random.Random(seed)
    writer = _Writer(rng=rng, is_beside=rng.random() < 0.125)
    result, weight = _chosen_weight(writer) if rng.random() < 0.125 else (_any_loss(writer), "")
    writer.value("h")  # a batch has samples, whatever the loss reads
    return RandomProgram(
        seed=seed,
        source=HEADER + writer.program(result) + weight,
        tags=tuple(dict.fromkeys((*writer.tags, *(["beside"] if writer.is_beside else [])))),
        may_coincide=bool(_MAY_COINCIDE.intersection(writer.tags)),
    )


def _any_loss(w: _Writer) -> str:
    terms = [_term(w) for _ in range(w.rng.choices((1, 2, 3), weights=(6, 4, 1))[0])]
    result = terms[0]
    if len(terms) > 1:
        rest = {f"t{i}": term for i, term in enumerate(terms)} | {"terms": ", ".join(terms)}
        joined = grammar.JOINED if w.chance(0.6) else grammar.LINEAR
        result = w.let("t", w.pick(joined, rest))
    if not w.is_beside and w.chance(0.15):
        result = w.let("t", w.pick(grammar.PENALTIES, {"t0": result}))
    return result


def _term(w: _Writer) -> str:
    kinds = (grammar.OF_TOKENS, grammar.MASKED, grammar.WEIGHTED, grammar.BUILT_IN)
    term = w.let("t", w.pick(w.rng.choices(kinds, weights=(2, 4, 2, 4))[0], {}))
    if w.chance(0.3):
        term = w.let("t", w.pick(grammar.CHANGED, {"t0": term}))
    return term


def _chosen_weight(w: _Writer) -> tuple[str, str]:
    """The loss, and the text of `loss_weight`."""
    if w.chance(0.5):
        w.tags.append('loss_weight="sum"')
        result = w.let("t", w.pick(grammar.SUMS, {}))
        if w.chance(0.3):
            result = w.let("t", f"{result} + {w.pick(grammar.SUMS, {})}")
        weight = '\nloss_weight = "sum"\n'
    else:
        name = w.rng.choice(list(grammar.COUNTED))
        w.tags += ["loss_weight=callable", name]
        template, count = grammar.COUNTED[name]
        result = w.let("t", w.expand(template, {}))
        weight = f"\nimport planner\n\n\ndef loss_weight(part):\n    return {count}\n"
    if not w.is_beside and w.chance(0.3):
        result = w.let("t", w.pick(grammar.PENALTIES, {"t0": result}))
    return result, weight


@dataclass
class _Writer:
    """Writes one program. Mutable: lines, and the names that they use, grow."""

    rng: random.Random
    is_beside: bool
    """Whether the loss is a function beside the model."""
    tags: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Of the loss."""
    trunk: list[str] = field(default_factory=list)
    """Of the model, ahead of its loss."""
    values: dict[str, None] = field(default_factory=dict)
    """Names that the trunk has made."""
    inputs: dict[str, None] = field(default_factory=dict)
    parts: dict[str, None] = field(default_factory=dict)
    count: int = 0

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def let(self, begins: str, text: str) -> str:
        """Write a value on a line of its own, and return its name."""
        self.count += 1
        name = f"{begins}{self.count}"
        self.lines.append(f"{name} = {text}")
        return name

    def pick(self, alternatives: Alternatives, known: dict[str, str]) -> str:
        """Return one of the alternatives, with names for what stands in it."""
        fitting = [n for n, t in alternatives.items() if not (self.is_beside and "self" in t)]
        name = self.rng.choice(fitting)
        if name:
            self.tags.append(name)
        return self.expand(alternatives[name], known)

    def expand(self, template: str, known: dict[str, str]) -> str:
        """Replace the names in a template; `known` holds those of the term, and grows."""
        return re.sub(r"\{([\w.]+)\}", lambda found: self._name(found[1], known), template)

    def _name(self, name: str, known: dict[str, str]) -> str:
        if name in known:
            return known[name]
        if name.startswith("self."):
            self.parts[name.removeprefix("self.")] = None
            return name
        if name == "size":
            self.value("h")
            rows = next(n for n in self.inputs if n not in _ALONE)
            return self.rng.choice((f"len({rows})", f"{rows}.shape[0]", f"{rows}.size(0)"))
        if name == "options":
            return self._options()
        if name in _OF_BATCH:
            self.inputs[name] = None
            return name
        if name not in grammar.RULES:
            return self.value(name)
        begins, alternatives = grammar.RULES[name]
        known[name] = self.let(begins, self.pick(alternatives, known))
        if name == "l" and self.chance(0.12):
            self.tags.append("focal")
            known[name] = self.let("l", grammar.FOCAL.format(known[name]))
        return known[name]

    def value(self, name: str) -> str:
        """Return a value of the model, which its trunk makes (for a loss beside it: returns)."""
        if name not in self.values:
            trunk = self.rng.choice(list(grammar.TRUNKS.values()))
            made = self.expand(trunk if name == "h" else grammar.MODEL[name], {})
            self.trunk.append(f"{name} = {made}")
            self.values[name] = None
        return name

    def _options(self) -> str:
        options = ""
        if self.chance(0.25):
            self.tags.append("weight=buffer")
            options += f", weight={self.value('rarity')}"
        if self.chance(0.25):
            self.tags.append("smoothing")
            options += ", label_smoothing=0.1"
        return options

    def program(self, result: str) -> str:
        """Return the text after the header."""
        names = [n for n in self.inputs if not self.is_beside or _stands(n, self.trunk)]
        made = ", ".join(f'"{name}": {name}' for name in self.values)
        ending = [*self.lines, f"return {result}"]
        lines = [
            "",
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {_init(name)}" for name in self.parts),
            "",
            f"    def forward(self, {', '.join(names)}{', **others' * self.is_beside}):",
            *(f"        {line}" for line in self.trunk),
            *(f"        {line}" for line in ([f"return {{{made}}}"] if self.is_beside else ending)),
            "",
            "",
        ]
        if self.is_beside:
            lines += [
                "def loss(output, batch):",
                *(f'    {name} = output["{name}"]' for name in self.values),
                *(f'    {name} = batch["{name}"]' for name in self.inputs),
                *(f"    {line}" for line in ending),
                "",
                "",
            ]
        given = ", ".join(f'"{name}"' for name in self.inputs)
        lines += [
            "def model(seed=0):",
            "    torch.manual_seed(seed)",
            "    return Model().double()",
            "",
            "",
            "def batch(size, seed=0):",
            "    made = everything(size, seed)",
            f"    return {{name: made[name] for name in [{given}]}}",
            "",
        ]
        return "\n".join(lines)


def _init(name: str) -> str:
    made = grammar.PARTS[name]
    is_buffer = name in grammar.BUFFERS
    return f'self.register_buffer("{name}", {made})' if is_buffer else f"self.{name} = {made}"


def _stands(name: str, lines: list[str]) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in lines)
