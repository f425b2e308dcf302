"""One file a schedule, or a family of them: a builder of rows of jobs, and what it states.

Importing this package imports every module in it, and so registers all schedules.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
