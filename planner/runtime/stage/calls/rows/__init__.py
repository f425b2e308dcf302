"""Rows that are taken by number: of a table with a gradient of rows (`table_lookup`), and of a
block's input in the order of their experts (`routed_rows`; their products
in 8 bits: `narrow_runs`).
"""
