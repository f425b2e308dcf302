"""Op placements of one block class on one mesh axis, as plan files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import core_schema

from planner.language.layout.axes import (
    FOLDED,
    Degrees,
    OwnSizes,
    find_axis,
    lowered_axes,
    own_axes,
)
from planner.language.layout.placement import (
    OpSharding,
    Own,
    Partial,
    Placement,
    parse_placement,
)

MOST = 2**20
"""The most ranks, jobs of a kind, samples of a microbatch, blocks: beyond any cluster there is, and
what a damaged file must not ask for, since lists of so many are made."""

_OF_EXPERTS = tuple(axis.name for axis in FOLDED)

SIZE_FIELDS = ("degrees", "own_sizes")
"""Fields whose entries are fields of their own in a file, by the names of axes."""


def _sizes(make: Any) -> GetPydanticSchema:
    """Validate {axis: size}, or pairs of these, and keep what `make` returns of it."""

    def schema(_: Any, handler: Any) -> core_schema.CoreSchema:
        sizes = handler.generate_schema(dict[str, Annotated[int, Field(ge=1, le=MOST)]])
        return core_schema.no_info_after_validator_function(
            make,
            core_schema.no_info_before_validator_function(_as_dict, sizes),
            serialization=core_schema.plain_serializer_function_ser_schema(_as_dict),
        )

    return GetPydanticSchema(schema)


def _as_dict(sizes: Any) -> Any:
    """Return sizes by axis; what is none is left for the validation to refuse."""
    if isinstance(sizes, Degrees):
        return sizes.sizes
    return dict(sizes) if isinstance(sizes, tuple) else sizes


DegreesField = Annotated[Degrees, _sizes(lambda sizes: Degrees(**sizes))]
OwnSizesField = Annotated[OwnSizes, _sizes(lambda sizes: tuple(sizes.items()))]


def gathered(data: Any, into: str, names: tuple[str, ...]) -> Any:
    """Return the data of a record with the fields of these names put together in one field."""
    if not isinstance(data, Mapping) or into in data:
        return data
    rest = {key: value for key, value in data.items() if key not in names}
    return {**rest, into: {name: data[name] for name in names if data.get(name) is not None}}


class Record(BaseModel):
    """A part of a plan file: frozen, and no field may be unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WithOwnSizes(Record):
    """A part of a plan that stages of own sizes have to themselves.

    In a file each axis on which stages may differ is a field by its name: ``"tp": 2``, or null
    where the size is the plan's. In memory these are `own_sizes`.
    """

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        return gathered(data, "own_sizes", tuple(axis.name for axis in own_axes()))

    @model_serializer(mode="wrap")
    def _spread(self, handler: Any) -> dict[str, Any]:
        spread: dict[str, Any] = {}
        for key, value in handler(self).items():
            if key == "own_sizes":
                spread |= {axis.name: value.get(axis.name) for axis in own_axes()}
            else:
                spread[key] = value
        return spread


class ClassLayout(WithOwnSizes):
    """Op placements of one block class on one mesh axis.

    Attributes:
        class_index: position of the class in the graph's `classes`.
        axis: name of the axis, the innermost if not given. The layout is of the program as lowered
            on the axes before it (`planner.language.layout.axes.lowered_axes`), of the class's own
            program on the first, and on ep.
        own_sizes: of the stages that it is for, see `StagePlan`; empty: those of the plan's sizes.
        inputs: placement of each of the program's inputs, in order.
        params: placement in which each parameter rests.
        outputs: placement of each output.
        ops: name and `OpSharding` of each op that is not all-replicated.
    """

    class_index: int = Field(ge=0, le=MOST)
    axis: str = Field(default_factory=lambda: lowered_axes()[0].name)
    own_sizes: OwnSizesField = ()
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[tuple[str, str], ...]

    @property
    def op_shardings(self) -> dict[str, OpSharding]:
        """Parsed `ops`."""
        return {name: OpSharding.parse(text) for name, text in self.ops}

    @property
    def param_placements(self) -> tuple[Placement, ...]:
        """Parsed `params`."""
        return tuple(parse_placement(text) for text in self.params)

    @model_validator(mode="after")
    def _parses(self) -> ClassLayout:
        # (On the experts' mesh: how tokens come to experts, `planner.language.lowering.experts`.)
        if self.axis not in _OF_EXPERTS and find_axis(self.axis).cuts_batch:
            raise ValueError(f"axis {self.axis} cuts the batch; blocks have no layouts on it")
        for text in (*self.inputs, *self.outputs):
            if isinstance(parse_placement(text), Own):
                raise ValueError("blocks hand on no values of each rank's own (O); use R or S(dim)")
        for text in self.params:
            if isinstance(parse_placement(text), Partial | Own):
                raise ValueError("a parameter rests whole or sharded (R or S(dim)), never partial")
        for _, text in self.ops:
            OpSharding.parse(text)
        return self
