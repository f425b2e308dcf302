"""Few and light probes, for tests that measure."""

from profiles.measure.grid import collective_probes, standard_grid


def a_few_probes(device, *, float8=False, blocks=False):
    """Return the lightest probe of each target of the standard grid."""
    lightest = {}
    for probe in standard_grid(device):
        known = lightest.get(probe.op.target)
        if known is None or probe.forward.num_bytes < known.forward.num_bytes:
            lightest[probe.op.target] = probe
    return tuple(lightest.values())


def few_collectives(groups, most_bytes):
    return tuple(p for p in collective_probes(groups) if p.num_bytes in (2**10, 2**16, 2**18))
