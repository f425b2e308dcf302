"""The loads of single stages, out of the arrays of a priced plan."""

from dataclasses import fields

import numpy as np

from costmodel import PlanPrice, StageLoad


def stage_loads(price: PlanPrice) -> list[StageLoad]:
    stages = len(price.plan.stages)
    columns = {
        field.name: np.broadcast_to(getattr(price.load, field.name), stages)
        for field in fields(StageLoad)
    }
    return [
        StageLoad(**{name: float(values[stage]) for name, values in columns.items()})
        for stage in range(stages)
    ]
