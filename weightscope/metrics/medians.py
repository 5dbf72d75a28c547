"""The median of what is known."""

import numpy as np


def known_median(values: np.ndarray) -> float:
    """The median of those values that are not NaN; NaN where none is, without NumPy's warning.

    Parameters
    ----------
    values : array

    Returns
    -------
    float
    """
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")
