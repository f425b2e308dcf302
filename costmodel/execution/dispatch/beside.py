"""What compute hides of the exchanges of experts' rows."""

from __future__ import annotations

from costmodel.execution.executed import ExecutedProfile, KernelSeconds


def shown_rows_s(
    profile: ExecutedProfile, rows_s: float, *, shared_s: float, compute: KernelSeconds
) -> float:
    """Return what shows of exchanges that take `rows_s` in one direction of a block.

    `shared_s` are seconds of the experts that every token goes through, in that direction: no more
    is hidden behind them. `compute` is of all kernels of the block.
    """
    execution, dispatcher = profile.execution, profile.dispatcher
    if "shared_rows" in execution.overlaps and dispatcher.behind_shared:
        hidden_s = min(rows_s, shared_s)
        rows_s -= hidden_s - profile.rates.exposed_seconds(hidden_s, behind_s=shared_s)
    if not dispatcher.behind_microbatch or "rows" not in execution.overlaps:
        return rows_s
    # A forward's rows go beside another microbatch's backward, and the other way round.
    half_s = (compute.forward_s + compute.backward_s) / 2
    shown_s = profile.shown_seconds("rows", rows_s, behind_s=half_s)
    # That compute has what the exchange leaves it of the multiprocessors.
    return min(rows_s, shown_s + dispatcher.sms_part * min(rows_s, half_s))
