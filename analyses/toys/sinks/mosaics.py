"""Images with a subject and a background, made of scikit-learn's 8 x 8 digits, with a label for each patch.

An image is a 3 x 3 grid of cells of 8 x 8 pixels. The subject, one digit at twice its size, covers four cells; each of
the other five has a small digit or nothing, at random. An image's class is its subject; a patch's label is the digit
that it lies on, or none. So the class needs a summary of the image, and the labels need to know what is where.
"""

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

CELL = 8  # pixels
GRID = 3  # cells
SIDE = GRID * CELL
PATCH = 4  # pixels
PATCHES = (SIDE // PATCH) ** 2
NOTHING = 10  # the label of a patch without a digit
CLASSES = 10
TEST_SHARE = 4  # every fourth digit is for test images


@dataclass(frozen=True)
class Mosaics:
    """Images with their labels."""

    patches: np.ndarray  # Pixels of each patch, standardised, float32 (images, PATCHES, PATCH^2)
    classes: np.ndarray  # (images,)
    labels: np.ndarray  # Of each patch, 0 to 9 or NOTHING, (images, PATCHES)


def mosaics(count: int, seed: int, test: bool) -> Mosaics:
    """Draw images. Training and test images share no digit."""
    rng = np.random.default_rng([seed, test])
    digits = load_digits()
    kept = (np.arange(len(digits.target)) % TEST_SHARE == 0) == test
    pictures, targets = digits.images[kept] / 16.0, digits.target[kept]  # (digits, 8, 8), 0 to 1
    images = np.zeros((count, SIDE, SIDE), np.float32)
    labels = np.full((count, SIDE // PATCH, SIDE // PATCH), NOTHING)
    classes = np.zeros(count, np.int64)
    for i in range(count):
        corner = rng.integers(0, GRID - 1, size=2)  # the subject's upper left cell
        small = [c for c in np.ndindex(GRID, GRID) if not all(t <= x <= t + 1 for t, x in zip(corner, c, strict=True))]
        shown = [(tuple(corner), 2)] + [(cell, 1) for cell in small if rng.random() < 0.5]
        for (row, column), scale in shown:
            drawn = rng.integers(len(targets))
            picture = np.kron(pictures[drawn], np.ones((scale, scale)))  # (8 scale, 8 scale)
            place = np.s_[row * CELL : (row + scale) * CELL, column * CELL : (column + scale) * CELL]
            images[i][place] = picture
            labels[i][tuple(slice(s.start // PATCH, s.stop // PATCH) for s in place)] = targets[drawn]
            if scale == 2:
                classes[i] = targets[drawn]
    images += rng.normal(0, 0.05, images.shape).astype(np.float32)  # so that no two empty patches are equal
    images = (images - 0.2) / 0.35  # about the mean and spread of the pixels
    rows = images.reshape(count, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    patches = rows.transpose(0, 1, 3, 2, 4).reshape(count, PATCHES, PATCH * PATCH)
    return Mosaics(np.ascontiguousarray(patches), classes, labels.reshape(count, PATCHES))
