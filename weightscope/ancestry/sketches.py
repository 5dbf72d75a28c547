"""A checkpoint's fingerprint: random sketches of every head's W_QK and W_VO, and their spectra.

A sketch of W is K numbers y_k = u_k' W v_k with u_k, v_k random signs, the same for every checkpoint of a width. Over
their choice E[sum_k y_k y'_k] / K = <W, W'>, so the cosine of two sketches estimates the cosine of two matrices, with
an error of about 1 / sqrt(K). A sketch identifies a head, but W cannot be recovered from it.

Each map has two sketches and a spectrum; each survives different changes of a checkpoint:

    direct      u, v in the basis of the stream; survives training, rounding and merging
    tokens      u, v combined from some token embeddings; also survives a rotation or permutation of the stream
    spectra     singular values over the norm; survive every change of basis
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from weightscope.attention.factored import core_singular_values, inner, triangle
from weightscope.attention.layer import Layer
from weightscope.checkpoint.config import digest_of
from weightscope.compute.cores import in_threads
from weightscope.display import ShowsShapes
from weightscope.errors import CheckpointError, printable
from weightscope.files import new_file, regular_file
from weightscope.findings import indexed
from weightscope.model import Model, as_model
from weightscope.progress import bar

VERSION = 1
SUFFIX = ".wsf"
SKETCH = 128  # K, numbers of a sketch
POINTS = 16  # singular values of a spectrum
TOKENS, RUN = 4096, 256  # tokens whose embeddings are combined, and how many have consecutive ids
TOKEN_RANGE = 16384  # they are among the first ids, which a cut vocabulary keeps
COMBINED = 32  # combinations of tokens that span what W is seen through
SHRINK = 0.1  # of their mean square, added before they are made orthonormal
LARGEST_PRINT = 64 << 20  # bytes of a fingerprint file; that of a 70B model has 3 MB
SIZES = ("d_model", "layers", "heads", "kv_heads", "vocabulary")  # in every description
NO_TOKENS = ("vocabulary", None)  # of a checkpoint without a token embedding
LEAST = 1e-6  # of a singular value relative to the norm: float32's rounding


@dataclass(frozen=True, eq=False, repr=False)
class Sketches(ShowsShapes):
    """A checkpoint's fingerprint, of N heads in L layers.

    Attributes
    ----------
    about : dict
        Its name, sizes and dtypes, and digests of its config and tokenizer; shown separately, never evidence.
    layer, head, kv_head : (N,) int arrays
    direct, tokens : (N, 2, K) float32 arrays
        Sketches of W_QK and W_VO, of unit length; `tokens` is empty, (N, 2, 0), without a token embedding.
    spectra : (N, 2, S) float32 array
        Logarithms of singular values over the Frobenius norm.
    norms : (N, 2) float32 array
        Frobenius norms.
    source : Model or None
        The model, if the fingerprint was just computed from one.
    """

    about: dict[str, Any]
    layer: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    direct: np.ndarray
    tokens: np.ndarray
    spectra: np.ndarray
    norms: np.ndarray
    source: Model | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What to call the checkpoint."""
        return str(self.about["name"])

    def called(self, name: str) -> "Sketches":
        """The same fingerprint under another name."""
        return replace(self, about=self.about | {"name": name})

    @cached_property
    def layers(self) -> list[int]:
        """The layers that have heads, in order."""
        return np.unique(self.layer).tolist()

    def of_layer(self, layer: int) -> np.ndarray:
        """Positions of a layer's heads."""
        return np.flatnonzero(self.layer == layer)

    def of_layers(self, name: str) -> np.ndarray:
        """One row per layer, independent of the order of heads: sums of sketches, or mean spectra."""
        values = getattr(self, name)
        if name == "spectra":
            return np.stack([values[self.of_layer(i)].mean(axis=0).ravel() for i in self.layers])  # (L, 2 S)
        sums = [(values * self.norms[..., None])[self.of_layer(i)].sum(axis=0).ravel() for i in self.layers]
        return _unit(np.stack(sums))  # (L, 2 K)

    def save(self, path: str | Path) -> None:
        """Write the fingerprint as a safetensors file, whole or not at all."""
        from safetensors.numpy import save

        arrays = {name: _bytes(getattr(self, name)) for name in ("direct", "tokens")}
        arrays |= {f"layers_{name}": _bytes(self.of_layers(name)) for name in ("direct", "tokens")}
        arrays |= {"spectra": self.spectra.astype(np.float16)}
        arrays |= {"layers_spectra": self.of_layers("spectra").astype(np.float16)}
        arrays |= {"norms": self.norms, "heads": np.stack([self.layer, self.head, self.kv_head]).astype(np.int32)}
        with new_file(Path(path)) as file:
            file.write(save(arrays, {"weightscope": json.dumps({"version": VERSION, **self.about})}))


def fingerprint(source: Model | str | Path) -> Sketches:
    """Sketch every head of a checkpoint, with one layer in memory.

    Parameters
    ----------
    source : Model, str or Path
        A model, or anything that `open_model` opens.

    Raises
    ------
    CheckpointError
        It cannot be read, or a head's map exceeds float32.

    Examples
    --------
    >>> from weightscope.ancestry.sketches import fingerprint
    >>> sketches = fingerprint("embedded")
    >>> sketches.direct.shape, sketches.layers
    ((16, 2, 128), [0, 1])
    """
    model = as_model(source)
    if not model.attention_layers:
        raise CheckpointError("has no attention layer; a fingerprint needs attention heads", file=model.name)
    through = _token_basis(model)  # (m, d), or None
    parts = [_layer_sketches(model.layer(i), through) for i in bar(model.attention_layers, "layers", "layer")]
    layer, head, kv_head, direct, tokens, spectra, norms = (np.concatenate(part) for part in zip(*parts, strict=True))
    if len(broken := np.unique(layer[~np.isfinite(norms).all(axis=1)])):
        problem = f"{indexed('layer', broken.tolist())}: W_QK or W_VO of a head exceeds float32, and cannot be compared"
        raise CheckpointError(problem, file=model.name)
    return Sketches(_about(model), layer, head, kv_head, direct, tokens, spectra, norms, model)


def load(path: str | Path) -> Sketches:
    """Read what `Sketches.save` wrote.

    Raises
    ------
    CheckpointError
        It is not a fingerprint, is damaged, or was written by another version.
    """
    path = Path(path)
    with opened(path) as file:
        about = json.loads((file.metadata() or {}).get("weightscope", "{}"))
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    return _checked(about, arrays, path)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A fingerprint file as safetensors opens it, which would wait for a pipe for ever; errors name the file."""
    from safetensors import SafetensorError, safe_open

    with regular_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST_PRINT:
            raise CheckpointError(f"has {size:,} bytes; a fingerprint has at most {LARGEST_PRINT:,}", file=path)
    try:
        with safe_open(path, "numpy") as arrays:
            yield arrays
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"is not a fingerprint ({printable(str(error))})", file=path) from None


def _checked(about: Any, arrays: dict[str, np.ndarray], path: Path) -> Sketches:
    """A fingerprint from these arrays, whose shapes and values are untrusted."""
    if not isinstance(about, dict) or not isinstance(about.get("name"), str):
        raise CheckpointError("is not a fingerprint: it does not describe a checkpoint", file=path)
    if about.pop("version", None) != VERSION:
        problem = f"is a fingerprint of another version; make a new one with `weightscope fingerprint` ({VERSION})"
        raise CheckpointError(problem, file=path)
    wrong = [key for key in SIZES if type(about.get(key, "")) is not int and (key, about.get(key, "")) != NO_TOKENS]
    if wrong:
        raise CheckpointError(f"is a damaged fingerprint: {', '.join(wrong)} should be whole numbers", file=path)
    n = arrays["heads"].shape[-1] if "heads" in arrays and arrays["heads"].ndim == 2 else 0
    tokens = arrays.get("tokens", np.empty(0)).shape
    shapes = {
        "heads": (3, n), "direct": (n, 2, SKETCH), "spectra": (n, 2, POINTS), "norms": (n, 2),
        "tokens": (n, 2, SKETCH if tokens[2:] != (0,) else 0),
    }  # fmt: skip
    wrong = [name for name, shape in shapes.items() if name not in arrays or arrays[name].shape != shape]
    if wrong or not n or not all(np.isfinite(array).all() for array in arrays.values()):
        raise CheckpointError(f"is a damaged fingerprint ({', '.join(wrong) or 'values are not finite'})", file=path)
    layer, head, kv_head = arrays["heads"].astype(np.int64)
    direct, tokens_seen, spectra, numbers = (
        arrays[name].astype(np.float32) for name in ("direct", "tokens", "spectra", "norms")
    )
    return Sketches(about, layer, head, kv_head, _unit(direct), _unit(tokens_seen), spectra, numbers)


def _about(model: Model) -> dict[str, Any]:
    """What is known about a checkpoint without its weights."""
    config, checkpoint = model.config, model.checkpoint
    dtypes = sorted({tensor.dtype for i in model.attention_layers for tensor in model.attention_tensors(i)})
    return {
        "name": model.name, "family": model.family.name, "tower": _tower(model),
        "d_model": config.d_model, "layers": config.n_layers, "heads": config.n_heads, "kv_heads": config.n_kv_heads,
        "vocabulary": _vocabulary(model), "dtypes": dtypes,
        "config": digest_of(checkpoint.config), "bytes": checkpoint.nbytes,
    }  # fmt: skip


def _tower(model: Model) -> str:
    """Which of a checkpoint's attention stacks it is; empty if there is no other."""
    names = [name for name, stack in model.stacks.items() if model.is_read(stack)]
    return names[0] if len(model.stacks) > 1 and names else ""


def _vocabulary(model: Model) -> int | None:
    """The number of tokens, or None if the checkpoint has no token embedding."""
    try:
        return model.embeddings.n_tokens
    except CheckpointError:
        return None


@lru_cache(maxsize=8)  # every head needs the same ones
def signs(count: int, width: int, side: str) -> np.ndarray:
    """Random signs (count, width), the same on every machine and with every NumPy: float32."""
    words = -(-count * width // 64)
    seed = int.from_bytes(sha256(f"weightscope {side} {width}".encode()).digest()[:16], "little")
    raw = np.random.PCG64(seed).random_raw(words)  # raw output, unlike a Generator's, never changes
    bits = np.unpackbits(raw.astype("<u8").view(np.uint8), count=count * width)
    return (bits.astype(np.float32) * 2 - 1).reshape(count, width)


def token_ids(vocabulary: int) -> np.ndarray:
    """The tokens that W is seen through: runs of ids, evenly spread over the first ones of a vocabulary."""
    starts = np.linspace(0, TOKEN_RANGE - RUN, TOKENS // RUN).astype(int)
    ids = (starts[:, None] + np.arange(RUN)).ravel()
    return np.arange(vocabulary) if vocabulary <= TOKENS else ids[ids < vocabulary]


def _token_basis(model: Model) -> np.ndarray | None:
    """Directions of the stream defined by token embeddings alone, orthonormal up to shrinkage: (m, d)."""
    vocabulary = _vocabulary(model)
    if not vocabulary:
        return None
    rows = model.into_stream(model.embeddings.rows(token_ids(vocabulary))).astype(np.float64)  # (n, d)
    if not np.isfinite(rows).all():
        return None
    rows -= rows.mean(axis=0)
    combined = signs(COMBINED, len(rows), "tokens").astype(np.float64) @ rows  # (m, d)
    values, vectors = np.linalg.eigh(combined @ combined.T)
    size = float(values.mean())
    if not size > 0:
        return None
    whitening = vectors / np.sqrt(np.maximum(values, 0) + SHRINK * size) @ vectors.T  # (m, m)
    return (whitening @ combined).astype(np.float32)


def _layer_sketches(layer: Layer, through: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """Layer, head and key-value head, sketches, spectra and norms of a layer's heads."""
    shared = layer.n_heads // layer.n_kv_heads
    with np.errstate(over="ignore", invalid="ignore"):
        groups = list(in_threads(lambda g: list(_group_sketches(layer, g, shared, through)), range(layer.n_kv_heads)))
    heads = [head for group in groups for head in group]
    direct, tokens, spectra, norms = (np.stack(part) for part in zip(*heads, strict=True))
    index = np.arange(layer.n_heads)
    return np.full(layer.n_heads, layer.index), index, index // shared, direct, tokens, spectra, norms


def _group_sketches(
    layer: Layer, group: int, shared: int, through: np.ndarray | None
) -> Iterator[tuple[np.ndarray, ...]]:
    """Direct sketch, sketch through tokens, spectrum and norm of each head that shares a key-value head: (2, ...)."""
    k, v = layer.k.of(group)[0], layer.v.of(group)[0]  # (d, r)
    of_k, of_v = _Side(k, "right", through), _Side(v, "left", through)
    for h in range(group * shared, (group + 1) * shared):
        head = layer.head(h)
        q, o = head.query_at(0)[0], head.w_o.T
        pairs = ((_Side(q, "left", through), of_k), (of_v, _Side(o, "right", through)))
        parts = [_sketch(left, right) for left, right in pairs]
        yield tuple(np.stack(part) for part in zip(*parts, strict=True))


class _Side:
    """One factor of a head's map, and what a sketch needs of it."""

    def __init__(self, factor: np.ndarray, side: str, through: np.ndarray | None) -> None:
        self.factor = factor  # (d, r)
        self.seen = signs(SKETCH, len(factor), side) @ factor  # (K, r)
        self.through = None if through is None or through.shape[1] != len(factor) else through @ factor  # (m, r)
        self.triangle = triangle(factor, inner(factor))


def _sketch(left: _Side, right: _Side) -> tuple[np.ndarray, ...]:
    """Direct sketch (K,), sketch through tokens (K,), spectrum (S,) and norm (1,) of left @ right'."""
    direct = np.vecdot(left.seen, right.seen)
    if left.factor.shape == right.factor.shape:  # heads that copy have a trace, however they were initialised
        n = len(left.factor)
        trace = float(np.vecdot(left.factor, right.factor).sum()) / n
        direct = direct - trace * np.vecdot(signs(SKETCH, n, "left"), signs(SKETCH, n, "right"))
    tokens = np.empty(0, np.float32)
    if left.through is not None and right.through is not None:
        seen = left.through @ right.through.T  # (m, m)
        seen[np.diag_indices(len(seen))] -= seen.trace() / len(seen)
        tokens = np.vecdot(signs(SKETCH, len(seen), "left") @ seen, signs(SKETCH, len(seen), "right"))
    s = core_singular_values(left.triangle, right.triangle)
    norm = float(np.sqrt((s**2).sum()))
    places = np.unique(np.geomspace(1, len(s), POINTS).round().astype(int)) - 1
    places = np.interp(np.arange(POINTS), np.linspace(0, POINTS - 1, len(places)), places).round().astype(int)
    spectrum = np.log(np.maximum(s[places] / (norm or 1.0), LEAST))
    return _unit(direct), _unit(tokens), spectrum.astype(np.float32), np.array(norm, np.float32)


def _unit(sketch: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(sketch, axis=-1, keepdims=True)
    return (sketch / np.where(length > 0, length, 1)).astype(np.float32)


def _bytes(sketches: np.ndarray) -> np.ndarray:
    """Sketches as signed bytes; their length is 1 and need not be stored."""
    largest = np.abs(sketches).max(axis=-1, keepdims=True, initial=0)
    return np.rint(127 * sketches / np.where(largest > 0, largest, 1)).astype(np.int8)


def is_fingerprint(source: object) -> TypeGuard[str | Path]:
    """Whether a source names a fingerprint file."""
    return isinstance(source, str | Path) and str(source).endswith(SUFFIX)
