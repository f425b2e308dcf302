"""Products: each entry of the output is a sum over an inner dim, which costs most of a step."""
