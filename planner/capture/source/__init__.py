"""From a user's model file to its kept capture.

In: the path of a ``model.py``. Out: the model and its batch (`model_file`), and its graph from the
disk where the file has not changed (`capture_cache`). `decoder` is what model files made of sizes
alone build.
"""
