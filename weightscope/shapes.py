"""What classes that hold arrays have in common: they are shown by the shapes of their arrays."""

from dataclasses import fields
from reprlib import Repr
from typing import Any


class ShowsShapes:
    """Base of dataclasses that hold arrays: in their repr an array is its shape.

    A dataclass compares its fields, and arrays have no single truth value. Such classes are therefore declared with
    `@dataclass(eq=False, repr=False)`: an object equals itself alone, and can be a key.
    """

    def __repr__(self: Any) -> str:
        values = (f"{field.name}={SHAPES.repr(getattr(self, field.name))}" for field in fields(self) if field.repr)
        return f"{type(self).__name__}({', '.join(values)})"


class _Shapes(Repr):
    """Values in a few characters, and whatever has a shape as its shape."""

    def repr1(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", ())
        return str(tuple(shape)) if shape else super().repr1(x, level)


SHAPES = _Shapes()
