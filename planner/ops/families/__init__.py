"""One file a family of ops: what its functions compute, and the record that joins them.

Importing this package imports every module in it, and so registers all records.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
