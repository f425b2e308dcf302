"""What writes generated pages and pictures of the documentation: ``python -m docs.build.NAME``.

In come results of benchmarks, examples and schedules; out come accuracy.md, families.md, the
drawings of concepts.md, and pictures of a report and of the page.
"""
