"""Well-known models as a `ModelGraph` made of their sizes, without torch and without a capture.

In: a `Transformer` (sizes, and how its code is written). Out: the graph that a capture of such a
model yields: the same ops with the same attributes, so whatever prices, lowers or draws a capture
does so here. Layers that are alike are blocks of one class: a graph of a hundred layers is built
as fast as one of two. Read `transformer` (what can be described), `tape` (how a block is written
down), `modules` and `huggingface` (blocks in two ways of writing them; `gpt2`, `routed` and
`shared_parts` belong to the second), `preamble` and `build` (the chain); `splits` has the usual
layouts of its blocks on tp and cp.
"""

from planner.language.templates.build import build_transformer
from planner.language.templates.transformer import Adapters, Encoder, Experts, Latent, Transformer

__all__ = ["Adapters", "Encoder", "Experts", "Latent", "Transformer", "build_transformer"]
