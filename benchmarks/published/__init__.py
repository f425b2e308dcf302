"""The cost model beside runs, layers and kernels that others published.

In come tables of `PUBLISHED`, whose SOURCES.md says where each row is from; out come errors and
rankings by source. Read `accuracy` first (whole runs), then `intervals` (how sure an estimate is);
`layouts` has plans that others chose beside ours, `parts` their kernels and collectives;
`fit_rates` and `fit_published` fit what profiles ship, `configured` completes rows from the
configuration files that were published with them.
"""

import csv
from pathlib import Path

from benchmarks.harness import ROOT

PUBLISHED = ROOT.parent / "shared" / "data" / "published"
"""Tables of published measurements, which lie beside the project and are no part of it."""


def records_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of measurements, by column (those of runs: `read_rows`)."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
