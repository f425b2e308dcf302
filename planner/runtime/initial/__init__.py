"""A model's first values: each rank makes the pieces it holds, and no process the whole model.

In: a function that builds the model, or a model on the meta device. `build` runs it under
`record`, which notes what is done to values; `replay` does that again, tensor by tensor, for what
this rank holds. `values` brings values to their places, from a recording or from a module that has
them, and `places` lists those of an engine. Read `record`, `replay`, `values`, `places`, `build`.
"""
