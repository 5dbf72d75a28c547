"""Mechanisms that few architectures have, one file for each or for a few of a kind; see `architectures.step`."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from weightscope.architectures.step import Step


@cache
def step_classes() -> dict[str, type[Step]]:
    """Every step in this folder, by its name in rows: a new file is found here without being listed."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    classes = [Step]
    for known in classes:
        classes += known.__subclasses__()
    return {step.name: step for step in classes if hasattr(step, "name")}
