"""Temperatures of attention by position: what multiplies the queries at a position."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Logarithm:
    """1 + weight log(1 + floor((position + first) / period)): 1 over a period, then growing (Llama 4, Ministral 3).

    Attributes
    ----------
    weight : float
    period : float
    first : int
        What position 0 counts as.
    counted : bool
        Tokens are counted from the first one there is, whatever their positions (Llama 4's code does).
    """

    weight: float
    period: float
    first: int = 0
    counted: bool = False

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Of tokens at positions (n,), (n,)."""
        positions = np.arange(len(positions)) if self.counted else positions
        return 1 + self.weight * np.log1p(np.floor((positions + self.first) / self.period))

    def __str__(self) -> str:
        start = f"p + {self.first}" if self.first else "p"
        return f"1 + {self.weight:g} log(1 + floor(({start}) / {self.period:g}))"


@dataclass(frozen=True)
class Power:
    """(1 + (position + 1) / period)^exponent.

    Attributes
    ----------
    exponent : float
    period : float
    """

    exponent: float
    period: float

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Of tokens at positions (n,), (n,)."""
        return (1 + (positions + 1) / self.period) ** self.exponent

    def __str__(self) -> str:
        return f"(1 + (p + 1) / {self.period:g})^{self.exponent:g}"


Temperature = Logarithm | Power
