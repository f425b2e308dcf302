"""M17: all cuts of a chain by their bound, beside a list of every cut there is."""

import numpy as np
import pytest

from search.partition.chain_dp import cut_value, solve_chain
from search.partition.chain_paths import Paths
from search.partition.other_cuts import OtherCuts
from tests.referees.cuts import all_cuts
from tests.search.chains import random_chain


def listed(problem, ceiling):
    """All cuts of a problem under a ceiling in the order they come, with the bounds on the way."""
    cuts = OtherCuts(problem, ceiling)
    while cuts.bound < ceiling:
        bound = cuts.bound
        cut = cuts.advance()
        if cut is not None:
            assert cut.value == pytest.approx(bound, rel=1e-12)
            yield cut


def test_every_cut_comes_once_in_the_order_of_its_bound():
    rng = np.random.default_rng(17)
    most = 0
    for _ in range(60):
        problem = random_chain(rng)
        paths = Paths.of_all(problem)
        values = {(*cut,): cut_value(paths, *cut) for cut in all_cuts(problem)}
        fitting = sorted(value for value in values.values() if value < np.inf)
        ceiling = fitting[len(fitting) // 2] * (1 + 1e-9) if fitting else 1e9
        found = list(listed(problem, ceiling))
        assert [cut.value for cut in found] == pytest.approx(
            [value for value in fitting if value < ceiling], rel=1e-12
        )
        assert len({(cut.cuts, cut.choices) for cut in found}) == len(found)
        assert all(
            values[cut.cuts, cut.choices] == pytest.approx(cut.value, rel=1e-12) for cut in found
        )
        best = solve_chain(problem).cut
        assert (best is None) == (not fitting)
        if best is not None:
            assert found[0].value == pytest.approx(best.value, rel=1e-12)
        most = max(most, len(found))
    assert most > 50
