"""Profiles whose links between nodes are others: a link by its name, or today's at another rate.

What crosses nodes follows its link. A fitted piece has alpha times the ratio of latencies and beta
times the ratio of seconds per byte. Of a measured collective only what exceeds its latency changes,
with `num_steps` dependent messages of `alpha_s` each:

    seconds' = latency + (seconds - latency) / factor        latency = min(seconds, steps * alpha_s)
"""

from __future__ import annotations

from planner.errors import ProfileError
from profiles.lookup.wire import num_steps
from profiles.profile import DeviceGroup, GroupedProfile, Profile
from profiles.records import (
    ClusterRecord,
    CollectiveFit,
    CollectiveRecord,
    LinkRecord,
    ProfileFile,
)

_SCALED_ERROR = 0.1
"""Relative error added to what is known of one link and said of another."""


def with_inter_node(file: ProfileFile, link: LinkRecord, *, name: str) -> ProfileFile:
    """Return a profile's file, called `name`, whose nodes are linked by `link`."""
    today = file.cluster.inter_node
    share = link.beta_s_per_byte.value / today.beta_s_per_byte.value
    steps = link.alpha_s.value / today.alpha_s.value
    cluster = file.cluster.model_copy(update={"inter_node": link})
    fits = _scaled(file.collective_fits, steps=steps, share=share, of=link.name)
    return file.model_copy(update={"name": name, "cluster": cluster, "collective_fits": fits})


def with_link_rate(profile: Profile, factor: float) -> Profile:
    """Return a profile whose links between nodes, and those further out, have `factor` times
    today's rate; latencies stay. Raises ProfileError for a factor that is no positive number.
    """
    if not 0 < factor < float("inf"):
        raise ProfileError(
            f"`link_rate` {factor:g} was given; it multiplies the rate of the links between nodes, "
            "so it is a number above 0, such as 0.5 or 2"
        )
    if factor == 1:
        return profile
    if profile.groups:
        groups = [
            DeviceGroup(
                name=group.name,
                profile=with_link_rate(group.profile, factor),
                num_devices=group.num_devices,
            )
            for group in profile.groups
        ]
        return GroupedProfile(profile.name, groups)
    file, cluster = profile.file, profile.file.cluster
    tiers = tuple(
        tier.model_copy(update={"link": _at_rate(tier.link, factor)})
        # Tiers smaller than a node are links inside it, which stay as they are.
        if tier.devices >= cluster.devices_per_node
        else tier
        for tier in cluster.tiers
    )
    file = with_inter_node(file, _at_rate(cluster.inter_node, factor), name=file.name)
    file = file.model_copy(update={"cluster": file.cluster.model_copy(update={"tiers": tiers})})
    collectives = [_at_rate_measured(record, cluster, factor) for record in profile.collectives]
    return Profile(file, profile.ops, collectives)


def _scaled(
    fits: tuple[CollectiveFit, ...], *, steps: float, share: float, of: str
) -> tuple[CollectiveFit, ...]:
    return tuple(
        fit
        if fit.num_nodes == 1
        else fit.model_copy(
            update={
                "pieces": tuple(piece.scaled(steps=steps, share=share) for piece in fit.pieces),
                "relative_error": fit.relative_error + _SCALED_ERROR,
                "detail": f"{fit.detail}; scaled to {of}",
            }
        )
        for fit in fits
    )


def _at_rate(link: LinkRecord, factor: float) -> LinkRecord:
    rate = link.beta_s_per_byte
    changed = rate.model_copy(
        update={
            "value": rate.value / factor,
            "origin": "assumed",
            "detail": f"{factor:g} times the rate of: {rate.detail}",
        }
    )
    return link.model_copy(
        update={"name": f"{link.name} at {factor:g} times its rate", "beta_s_per_byte": changed}
    )


def _at_rate_measured(
    record: CollectiveRecord, cluster: ClusterRecord, factor: float
) -> CollectiveRecord:
    if record.num_nodes == 1:
        return record
    steps = num_steps(record.kind, record.ranks_per_node * record.num_nodes)
    latency_s = min(record.seconds, steps * cluster.inter_node.alpha_s.value)
    seconds = latency_s + (record.seconds - latency_s) / factor
    return record.model_copy(update={"seconds": seconds})
