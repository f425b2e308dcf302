"""Ops of blocks whose ranks send each other rows: of tables, of experts, of all samples."""
