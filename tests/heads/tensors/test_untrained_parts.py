"""Matrices that may hold independent values: those that do, whatever their distribution, and no trained ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.heads.tensors.untrained_parts import LEAST_WIDE, matrix_of, may_be_random
from weightscope.model.model import open_tensors

SHAPES = ((64, 64), (300, 768), (192, 256), (256, 32), (4, 80, 48), (64, 3, 8, 8))
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.normal(0, 0.02, shape),
    "uniform": lambda rng, shape: rng.uniform(0, 1, shape),
    "Cauchy": lambda rng, shape: rng.standard_cauchy(shape),
    "Student's": lambda rng, shape: rng.standard_t(3, shape),
    "lognormal": lambda rng, shape: rng.lognormal(0, 2, shape),
    "of three values": lambda rng, shape: rng.integers(-1, 2, shape),
    "nearly all zero": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.01),
    "cut off": lambda rng, shape: np.clip(rng.standard_normal(shape), -2, 2),
}


def tensors_of(folder: Path, **arrays: np.ndarray) -> list[Tensor]:
    save_file({name: array.astype(np.float32) for name, array in arrays.items()}, folder / "model.safetensors")
    return [each.unchecked(set()) for each in open_tensors(folder).checkpoint.values()]


@pytest.mark.parametrize("draw", DRAWS)
def test_independent_values_may_be_random(draw: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    arrays = {f"{shape}, {i}": DRAWS[draw](rng, shape) for shape in SHAPES for i in range(10)}
    assert all(map(may_be_random, tensors_of(tmp_path, **arrays)))


def test_an_orthogonal_matrix_may_be_random(tmp_path: Path) -> None:
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((256, 256)))
    assert all(map(may_be_random, tensors_of(tmp_path, q=q, wide=q[:64])))


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (300, 768)], ids=str)
def test_rows_or_columns_of_two_sizes_and_a_shared_direction_are_not_random(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    w, sizes = rng.standard_normal(shape), [1.0, 1.5]
    shared = 0.5 * np.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1]))
    arrays = {
        "rows": w * rng.choice(sizes, (shape[0], 1)),
        "columns": w * rng.choice(sizes, shape[1]),
        "shared": w + shared,
    }
    assert not any(map(may_be_random, tensors_of(tmp_path, **arrays)))


def test_no_trained_matrix_may_be_random_but_shuffled_it_may(tmp_path: Path) -> None:
    trained = {name: each for name, each in open_tensors("embedded").checkpoint.items()
               if min(matrix_of(each.shape)) >= LEAST_WIDE}  # fmt: skip
    assert len(trained) == 18 and not any(map(may_be_random, trained.values()))
    rng = np.random.default_rng(2)
    shuffled = {name: rng.permutation(each.read().ravel()).reshape(each.shape) for name, each in trained.items()}
    assert all(map(may_be_random, tensors_of(tmp_path, **shuffled)))
