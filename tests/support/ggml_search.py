"""Copies in ggml's types of one scale, with codes that are searched by an importance matrix, as llama-quantize does."""

from pathlib import Path

import numpy as np

GROUP = 32
LARGEST = {"Q4_0": 8, "Q5_0": 16, "Q4_1": 15, "Q5_1": 31}  # the largest code, or the size of the least


def importance_of(width: int, seed: int = 0) -> np.ndarray:
    """An importance for each input."""
    return (np.random.default_rng(seed).chisquare(1, width) + 1e-3).astype(np.float32)


def searched(rows: np.ndarray, importance: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The codes (n, groups, 32) of rows (n, width), and a scale and a minimum of each group, float16.

    Of several scales, the codes count that leave the least error, weighted by importance; then the scale that fits
    these best.
    """
    rows = rows.astype(np.float64)
    x = rows.reshape(len(rows), -1, GROUP)
    spread = np.mean(rows**2, axis=1)[:, None, None]
    w = importance.astype(np.float64).reshape(-1, GROUP) * np.sqrt(spread + x**2)
    return (_with_minimum if kind.endswith("_1") else _symmetric)(x, w, LARGEST[kind])


def _symmetric(x: np.ndarray, w: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=2)[..., None], axis=2)
    best, codes, scale = np.full(x.shape[:2], -np.inf), np.zeros_like(x), np.zeros(x.shape[:2])
    for tenths in (0, *range(-9, 0), *range(1, 10)):
        tried = np.clip(np.rint(-(most + 0.1 * tenths) / largest * x), -most, most - 1)
        along, squares = (w * x * tried).sum(axis=2), (w * tried**2).sum(axis=2)
        is_better = along**2 / squares > best
        best = np.where(is_better, along**2 / squares, best)
        codes = np.where(is_better[..., None], tried, codes)
        scale = np.where(is_better, along / squares, scale)
    return codes, scale.astype(np.float16), np.zeros_like(scale, np.float16)


def _with_minimum(x: np.ndarray, w: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    least, top = np.minimum(x.min(axis=2, keepdims=True), 0), x.max(axis=2, keepdims=True)
    of_w, of_x = w.sum(axis=2), (w * x).sum(axis=2)
    best, codes = np.full(x.shape[:2], np.inf), np.zeros_like(x)
    scale, minimum = np.zeros(x.shape[:2]), least[..., 0]
    for step in range(37):
        tried = np.clip(np.rint((most - 0.9 + 0.05 * step) / (top - least) * (x - least)), 0, most)
        sums, squares, along = ((w * each).sum(axis=2) for each in (tried, tried**2, tried * x))
        divisor = of_w * squares - sums**2
        fitted, start = (of_w * along - of_x * sums) / divisor, (squares * of_x - sums * along) / divisor
        fitted, start = np.where(start > 0, along / squares, fitted), np.minimum(start, 0)
        error = (w * (fitted[..., None] * tried + start[..., None] - x) ** 2).sum(axis=2)
        is_better = error < best
        best, scale, minimum = (
            np.where(is_better, *each) for each in ((error, best), (fitted, scale), (start, minimum))
        )
        codes = np.where(is_better[..., None], tried, codes)
    return codes, scale.astype(np.float16), minimum.astype(np.float16)


def packed(rows: np.ndarray, importance: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of rows (n, width) as a GGUF file has them, (n, bytes)."""
    codes, scale, minimum = searched(rows, importance, kind)
    codes = (codes + (0 if kind.endswith("_1") else LARGEST[kind])).astype(np.uint8)
    parts = [scale[..., None].view(np.uint8)]
    if kind.endswith("_1"):
        parts.append(minimum[..., None].view(np.uint8))
    if kind.startswith("Q5"):
        parts.append(np.packbits(codes >> 4, axis=2, bitorder="little"))
    low = codes & 15
    parts.append(low[..., : GROUP // 2] | low[..., GROUP // 2 :] << 4)
    return np.concatenate(parts, axis=2).reshape(len(rows), -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    """A GGUF file of tensors whose bytes are ready, each with its type."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
