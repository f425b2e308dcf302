"""The form's text as a request of the search, or one line on what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.inputs import parse_precision
from commands.common.question import Question
from commands.page.fields import CHOICES, CLUSTER, FIELDS, SIZES, TRAINING, Field
from commands.page.models import find_model
from planner.errors import PlannerError
from profiles import shipped_names

if TYPE_CHECKING:
    from planner.language.templates import Transformer
    from search import SearchRequest


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question of the page."""

    model: Path | None
    """The model file; None: a decoder of the sizes given."""
    model_given: str
    """Its name, as it was given."""
    sizes: Transformer | None
    """Sizes of the decoder; None: of a model file."""
    profile: str
    """The kind of machine."""
    link_rate: float
    """Rate of the links between nodes, as a multiple of the machine's."""
    length: int | None
    """Tokens of a sample; None: as the model file makes them."""
    request: SearchRequest
    """The rest, as a search takes it."""

    @property
    def command(self) -> str:
        """The command that answers the same; empty where no command does."""
        if self.model is None or self.length is not None or self.link_rate != 1:
            return ""
        request = self.request
        words = ["planner search", self.model_given, f"--gpus {request.num_devices}"]
        words += [f"--profile {self.profile}"] * bool(self.profile)
        words.append(f"--global-batch {request.global_batch}")
        if request.memory_limit_bytes is not None:
            words.append(f"--memory-limit {request.memory_limit_bytes / 2**30:g}")
        plain = Question(gpus=1).request(Path())
        for field in CHOICES:
            value, usual = (getattr(each, field.name) for each in (request, plain))
            if value != usual:
                # Of what is accepted the form has one.
                words.append(f"{field.flag} {value[0] if isinstance(value, tuple) else value}")
        return " ".join(words)


def parse_form(
    form: Mapping[str, str], folder: Path, profiles: Collection[str] | None = None
) -> Asked:
    """Return what a form asks; model files are those under `folder`, machines those of `profiles`
    (None: the shipped ones).

    Raises PlannerError, in one line, for what is no number or names nothing.
    """
    given = {name: text.strip() for name, text in form.items() if text.strip()}
    for name in given:
        if name not in FIELDS and name not in ("model", "profile"):
            raise PlannerError(f"{name!r} was given; it is no field of the form")
    name = given.get("model", "")
    model = find_model(folder, name) if name else None
    profile = given.get("profile", "")
    known = shipped_names() if profiles is None else profiles
    if profile and profile not in known:  # a name may be a folder, too
        raise PlannerError(f"GPU {profile!r} was given; it is one of {', '.join(known)}")
    read = {field.name: _read(field, given) for field in (*CLUSTER, *TRAINING, *CHOICES)}
    link_rate, length = read.pop("link_rate"), read.pop("length")
    if read["gpus"] is None:
        raise PlannerError("no number of GPUs was given; give one, such as 8")
    precision = parse_precision(read.pop("precision") or ("model" if model else "bf16"))
    # What is not searched, or not blank where it is left open, has the command's own default.
    values: dict[str, Any] = {name: value for name, value in read.items() if value is not None}
    if "accept" in values:
        values["accept"] = [values["accept"]]
    question = Question(**values, precision=precision)
    return Asked(
        model=model,
        model_given=name,
        sizes=None if model else _sizes(given),
        profile=profile,
        link_rate=1.0 if link_rate is None else link_rate,
        length=length,
        request=question.request(model or Path()),
    )


def _sizes(given: Mapping[str, str]) -> Transformer:
    from costmodel.execution import find_execution
    from costmodel.table.rows.row_sizes import sizes_of_row
    from costmodel.table.rows.row_words import Cells

    row = {field.name: given[field.name] for field in SIZES if _read(field, given) is not None}
    cells = Cells({**row, "seq_len": given.get("length", "")})
    return sizes_of_row(cells, find_execution("ours-eager"))


def _read(field: Field, given: Mapping[str, str]) -> Any:
    """Return a field's number or word; None where it is blank."""
    text = given.get(field.name, "")
    if not text:
        return None
    if field.name in _WORDS:
        return text
    said = f"{field.flag or field.name} {text} was given"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number) or (field.is_whole and number % 1):
        kind, such = ("whole number", "8") if field.is_whole else ("number", "0.5")
        raise PlannerError(f"{said}; it is a {kind}, written like {such}")
    if not 0 <= number <= field.most:
        raise PlannerError(f"{said}; it is 0 or more, and at most {field.most:,.0f}")
    return int(number) if field.is_whole else number


_WORDS = ("schedule", "recompute", "offload", "precision", "execution", "accept")
"""Fields that hold a word; the request says which words there are."""
