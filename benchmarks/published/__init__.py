"""The cost model beside runs, layers and kernels that others published.

In come tables of `PUBLISHED`, whose SOURCES.md says where each row is from; out come errors and
rankings by source. Read `accuracy` first (whole runs), then `intervals` (how sure an estimate is);
`fit_rates` and `fit_published` fit what profiles ship, `configured` completes rows from the
configuration files that were published with them.
"""

from benchmarks.harness import ROOT

PUBLISHED = ROOT.parent / "shared" / "data" / "published"
"""Tables of published measurements, which lie beside the project and are no part of it."""
