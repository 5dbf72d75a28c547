"""Positions that follow a formula and are stored in no file."""

import numpy as np

from weightscope.families.config import ModelConfig


def sinusoids(n: int, width: int, steps: int) -> np.ndarray:
    """Sines of n positions, then their cosines, at frequencies 10000^(-j / steps) ("Attention is all you need", 3.5).

    Parameters
    ----------
    n : int
    width : int
    steps : int
        Over so many of its width / 2 frequencies they fall to 1/10000: width / 2 in the paper, one less in
        tensor2tensor.

    Returns
    -------
    float32 (n, width) array
    """
    angles = np.outer(np.arange(n), 10000.0 ** (-np.arange(width // 2) / steps))
    rows = np.zeros((n, width), np.float32)
    rows[:, : 2 * (width // 2)] = np.concatenate((np.sin(angles), np.cos(angles)), axis=1)
    return rows


def of_the_paper(config: ModelConfig) -> np.ndarray:
    """CTRL: as in the paper, sines and cosines apart."""
    return sinusoids(config.n_positions or 0, config.d_model, config.d_model // 2)


def of_a_head(config: ModelConfig) -> np.ndarray:
    """RoFormer: sines and cosines of the angles by which a head's pairs turn."""
    return sinusoids(config.n_positions or 0, config.head_dim, config.head_dim // 2)


def of_tensor2tensor(config: ModelConfig) -> np.ndarray:
    """XGLM: two positions come first, and the padding token's row is zero."""
    rows = sinusoids((config.n_positions or 0) + 2, config.d_model, config.d_model // 2 - 1)
    padding = config.count("pad_token_id")
    if padding >= len(rows):
        raise config.error("pad_token_id", f"a number below that of positions, {len(rows)}")
    rows[padding] = 0
    return rows[2:]
