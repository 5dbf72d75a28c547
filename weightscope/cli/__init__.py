"""The command line. Each command imports what is heavy when it runs, so that --help stays fast."""

from importlib import import_module
from pkgutil import iter_modules

from weightscope.cli.command import main

__all__ = ["main"]

for _module in iter_modules(__path__):  # a command registers where it is written
    import_module(f"{__name__}.{_module.name}")
