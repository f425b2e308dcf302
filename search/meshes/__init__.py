"""Stages with meshes of their own. Read `mix` (which meshes stages choose from), `mixed_stages`
(the chain problem of such stages), `interleaved_mixes` (of ranks with several stages each).
"""
