"""A checkpoint's fingerprint: random sketches of every head's W_QK and W_VO, and their spectra.

A sketch of W is K numbers y_k = u_k' W v_k with u_k, v_k random signs, the same for every
checkpoint of a width. Over their choice E[sum_k y_k y'_k] / K = <W, W'>, so the cosine of two
sketches estimates the cosine of two matrices, with an error of about 1 / sqrt(K). A sketch
identifies a head, but W cannot be recovered from it. Which signs: see `probes`.

Each map has two sketches and a spectrum; each survives different changes of a checkpoint:

    direct      u, v in the basis of the stream; survives training, rounding and merging
    tokens      u, v combined from some token embeddings; also survives a rotation or permutation
                of the stream
    spectra     singular values over the norm; survive every change of basis
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from weightscope.checkpoint.config import LARGEST, digest_of, parse_json
from weightscope.checkpoint.provenance import file_record, source_of
from weightscope.checkpoint.storage import HeaderDigest, OpenFile, header_length, parse_header
from weightscope.core.compute.cores import in_threads
from weightscope.core.errors import CheckpointError, printable
from weightscope.core.files import new_file
from weightscope.core.progress import bar
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.factored import Factored, core_singular_values, inner, triangle
from weightscope.model.layers.layer import Layer
from weightscope.model.model import Model, as_model
from weightscope.pairs.lineage.probes import PUBLIC, Probes, digest_of_heads, signs
from weightscope.report.findings import indexed

VERSION = 1
SUFFIX = ".wsf"
SKETCH = 128  # K, numbers of a sketch
POINTS = 16  # singular values of a spectrum
TOKENS = 4096  # tokens whose embeddings are combined
RUN = 256  # consecutive ids among them
TOKEN_RANGE = 16384  # first ids, which a cut vocabulary keeps; the tokens are among them
COMBINED = 32  # combinations of tokens that span what W is seen through
FINELY = 256  # combinations if both have weights; fewer tokens are taken as they are
SHRINK = 0.1  # share of their mean square, added before they are made orthonormal
LARGEST_PRINT = 64 << 20  # bytes of a fingerprint file; a 70B model makes 3 MB
MOST_HEADS = 32_768  # heads of all layers; the largest published model has 16,128
MOST_LAYERS = 512  # layers with attention; the largest published model has 126
LONGEST_TEXT = 1_000  # characters of a name in a fingerprint file
STORED = {  # arrays of a file: safetensors' dtype and NumPy's
    **dict.fromkeys(("direct", "tokens", "layers_direct", "layers_tokens"), ("I8", "i1")),
    **dict.fromkeys(("spectra", "layers_spectra"), ("F16", "<f2")),
    "norms": ("F32", "<f4"),
    "heads": ("I32", "<i4"),
}
SIZES = ("d_model", "layers", "heads", "kv_heads", "vocabulary")  # in every description
NO_TOKENS = ("vocabulary", None)  # entry of a checkpoint without a token embedding
TEXTS = ("name", "family", "tower", "config", "probes", "heads_sha256")  # short texts in it
# 1 - cosine, or distance of logarithms, up to which a layer's row is its heads' sum, rounded
LAYERS_FOLLOW = 0.05
LEAST = 1e-6  # singular value over the norm: float32's rounding


@dataclass(frozen=True, eq=False, repr=False)
class Sketches(ShowsShapes):
    """A checkpoint's fingerprint, of N heads in L layers."""

    # name, sizes, dtypes, digest of the config; shown separately, never evidence
    about: dict[str, Any]
    layer: np.ndarray  # (N,)
    head: np.ndarray
    kv_head: np.ndarray
    direct: np.ndarray  # (N, 2, K) sketches of W_QK and W_VO, of unit length
    tokens: np.ndarray  # the same through token embeddings; (N, 2, 0) without
    spectra: np.ndarray  # (N, 2, S) logarithms of singular values over the Frobenius norm
    norms: np.ndarray  # (N, 2) Frobenius norms
    source: Model | None = field(default=None, repr=False)  # model that it was just computed from
    probes: Probes = field(default=PUBLIC, repr=False)  # source of its signs
    read: dict[str, Any] = field(default_factory=dict, repr=False)  # its files; see `source_of`

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return str(self.about["name"])

    def called(self, name: str) -> "Sketches":
        """A copy under another name."""
        return replace(self, about=self.about | {"name": name})

    @cached_property
    def layers(self) -> list[int]:
        """The layers that have heads, in order."""
        return np.unique(self.layer).tolist()

    def of_layer(self, layer: int) -> np.ndarray:
        """Positions of a layer's heads."""
        return np.flatnonzero(self.layer == layer)

    def of_layers(self, name: str) -> np.ndarray:
        """One row per layer, whatever the order of heads: summed sketches or mean spectra."""
        values = getattr(self, name)
        if name == "spectra":
            means = [values[self.of_layer(i)].mean(axis=0).ravel() for i in self.layers]
            return np.stack(means)  # (L, 2 S)
        weighted = values * self.norms[..., None].astype(np.float64)  # their sum may exceed float32
        sums = [weighted[self.of_layer(i)].sum(axis=0).ravel() for i in self.layers]
        return unit_length(np.stack(sums))  # (L, 2 K)

    def through(self, ids: np.ndarray) -> np.ndarray:
        """Sketches through the embeddings of these tokens (N, 2, K), from the weights."""
        assert self.source is not None
        model, basis = self.source, token_basis(self.source, ids, self.probes)
        layers = bar(model.attention_layers, "heads through tokens", "layer")
        sketched = (layer_sketches(model.layer(i), basis, self.probes) for i in layers)
        return np.concatenate([each.tokens for each in sketched])

    def save(self, path: str | Path) -> None:
        """Write the fingerprint as a safetensors file, whole or not at all."""
        from safetensors.numpy import save

        arrays = {
            "direct": as_bytes(self.direct),
            "tokens": as_bytes(self.tokens),
            "layers_direct": as_bytes(self.of_layers("direct")),
            "layers_tokens": as_bytes(self.of_layers("tokens")),
            "spectra": self.spectra.astype(np.float16),
            "layers_spectra": self.of_layers("spectra").astype(np.float16),
            "norms": self.norms,
            "heads": np.stack([self.layer, self.head, self.kv_head]).astype(np.int32),
        }
        description = {"weightscope": json.dumps({"version": VERSION, **self.about})}
        with new_file(Path(path)) as file:
            file.write(save(arrays, description))


def fingerprint(source: Model | str | Path, probes: Probes = PUBLIC) -> Sketches:
    """Sketch every head of a checkpoint, with one layer in memory.

    Parameters
    ----------
    source : Model, str or Path
        A model, or anything that `open_model` opens.
    probes : Probes
        Where the random signs come from; only fingerprints of the same probes can be compared.

    Raises
    ------
    CheckpointError
        It cannot be read, or a head's map exceeds float32.

    Examples
    --------
    >>> import weightscope as ws
    >>> sketches = ws.fingerprint("embedded")  # `sketches.save("embedded.wsf")` keeps it
    >>> sketches.direct.shape, sketches.layers
    ((24, 2, 128), [0, 1, 2, 3])
    """
    model = as_model(source)
    if not model.attention_layers:
        raise CheckpointError(
            "has no attention layer; a fingerprint needs attention heads", file=model.name
        )
    layers = len(model.attention_layers)
    check_sizes(layers * model.config.n_heads, layers, model.name)
    through = _token_basis(model, probes)  # (m, d), or None
    parts = [
        layer_sketches(model.layer(i), through, probes)
        for i in bar(model.attention_layers, "layers", "layer")
    ]
    heads = HeadSketches(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    broken = np.unique(heads.layer[~np.isfinite(heads.norms).all(axis=1)])
    if len(broken):
        problem = "W_QK or W_VO of a head exceeds float32, and cannot be compared"
        raise CheckpointError(f"{indexed('layer', broken.tolist())}: {problem}", file=model.name)
    about = described(model) | {
        "vocabulary": _vocabulary(model),
        "heads_sha256": digest_of_heads(model),
        "probes": probes.name,
    }
    return Sketches(
        about,
        *heads,
        source=model,
        probes=probes,
        read=source_of(model.checkpoint),
    )


def load(path: str | Path, probes: Probes = PUBLIC) -> Sketches:
    """Read what `Sketches.save` wrote.

    Raises
    ------
    CheckpointError
        It is not a fingerprint, is damaged, is larger than any model's, was written by another
        version or with other probes, or its rows for layers do not follow from its heads.
    """
    path = Path(path)
    about, (heads, direct, tokens, spectra, norms), file = stored(
        path, "heads", "direct", "tokens", "spectra", "norms"
    )
    n = heads.shape[1] if heads.ndim == 2 else 0
    tokens_width = 0 if tokens.shape[2:] == (0,) else SKETCH
    needed = {
        "heads": (heads, (3, n)),
        "direct": (direct, (n, 2, SKETCH)),
        "spectra": (spectra, (n, 2, POINTS)),
        "norms": (norms, (n, 2)),
        "tokens": (tokens, (n, 2, tokens_width)),
    }
    wrong = [name for name, (array, shape) in needed.items() if array.shape != shape]
    if not wrong and n and heads.min() < 0:
        wrong = ["heads"]
    elif not wrong and n and norms.min() < 0:
        wrong = ["norms"]
    if wrong or not n:
        problem = ", ".join(wrong) or "no heads"
        raise CheckpointError(f"is a damaged fingerprint ({problem})", file=path)
    layer, head, kv_head = heads.astype(np.int64)
    check_sizes(n, len(np.unique(layer)), path)
    check_probes(about, probes, path)
    file.read_digest()
    read = {"name": printable(path), "files": [file_record(file)]}
    sketches = Sketches(
        about,
        *(layer, head, kv_head, unit_length(direct), unit_length(tokens), spectra, norms),
        probes=probes,
        read=read,
    )
    _check_layers(sketches, path)
    return sketches


def check_probes(about: dict[str, Any], probes: Probes, path: Path) -> None:
    """Refuse a fingerprint made with other signs: its numbers mean nothing to others."""
    if about.get("probes", "") == probes.name:
        return
    made, how = "without", "leave the key out, or make the fingerprint again with it"
    if about.get("probes"):
        made, how = "with", "give that key"
    ours = "this key" if probes.name else "the public probes"
    problem = f"is a fingerprint made {made} a probe key, which cannot be read with {ours}; {how}"
    raise CheckpointError(problem, file=path)


def _check_layers(sketches: Sketches, path: Path) -> None:
    """Refuse layers' rows that are not sums over the heads: registries are searched by them."""
    names = ("direct", "tokens", "spectra")
    _, given, _ = stored(path, *(f"layers_{name}" for name in names))
    for name, rows in zip(names, given, strict=True):
        follow = sketches.of_layers(name)
        if follow.shape == rows.shape and _follows(follow, rows, name == "spectra"):
            continue
        problem = f"its layers_{name} do not follow from its heads"
        problem = f"{problem}; it was changed after it was made"
        raise CheckpointError(f"is a damaged fingerprint: {problem}", file=path)


def _follows(follow: np.ndarray, rows: np.ndarray, are_spectra: bool) -> bool:
    """True if stored rows of layers are those that follow from heads, up to rounding."""
    if are_spectra:
        apart = np.abs(follow - rows)
    else:
        is_known = np.linalg.norm(follow, axis=-1) > 0
        apart = 1 - np.vecdot(follow, unit_length(rows))[is_known]
    return not apart.size or bool(apart.max() <= LAYERS_FOLLOW)


def stored(path: Path, *names: str) -> tuple[dict[str, Any], list[np.ndarray], OpenFile]:
    """Read a fingerprint file's description and some arrays; sizes are checked before reading.

    Arrays are read and not mapped: a process that reads a map is killed when another cuts the file
    short.
    """
    file = OpenFile(path)
    if file.size > LARGEST_PRINT:
        raise CheckpointError(
            f"has {file.size:,} bytes; a fingerprint has at most {LARGEST_PRINT:,}", file=path
        )
    prefix = file.read(0, min(8, file.size)).tobytes()
    try:
        text = file.read(8, 8 + header_length(prefix, file.size, file=None)).tobytes()
        file.header = HeaderDigest.of(prefix + text)
        entries, metadata = parse_header(text, file.size, file=None)
        description = metadata.get("weightscope", "{}").encode()
        about = parse_json(description, file=None, what="its description ")
    except CheckpointError as error:
        raise CheckpointError(f"is not a fingerprint ({error})", file=path) from None
    _check_description(about, path)
    wrong = [
        name for name in names if name not in entries or entries[name].dtype != STORED[name][0]
    ]
    if wrong:
        raise CheckpointError(f"is a damaged fingerprint ({', '.join(wrong)})", file=path)
    arrays = []
    for name in names:
        entry = entries[name]
        rows = (entry.shape or (1,))[-1 if name == "heads" else 0]
        if name.startswith("layers_"):
            check_sizes(0, rows, path)
        else:
            check_sizes(rows, 0, path)
        raw = file.bytes_of(entry, 0, entry.stop - entry.start)
        array = raw.view(STORED[name][1]).reshape(entry.shape)
        if name != "heads":
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            problem = f"({name}: values are not finite)"
            raise CheckpointError(f"is a damaged fingerprint {problem}", file=path)
        arrays.append(array)
    return about, arrays, file


def _check_description(about: dict[str, Any], path: Path) -> None:
    """Refuse a description that no fingerprint has; all of it is shown."""
    if not isinstance(about.get("name"), str):
        raise CheckpointError("is not a fingerprint: it does not describe a checkpoint", file=path)
    if about.pop("version", None) != VERSION:
        how = f"make a new one with `weightscope fingerprint` ({VERSION})"
        raise CheckpointError(f"is a fingerprint of another version; {how}", file=path)
    sizes = {key: about.get(key, "") for key in SIZES}
    wrong = [
        key
        for key, size in sizes.items()
        if (key, size) != NO_TOKENS and not (type(size) is int and 1 <= size <= LARGEST)
    ]
    if wrong:
        problem = f"{', '.join(wrong)} should be whole numbers from 1 to {LARGEST:,}"
        raise CheckpointError(f"is a damaged fingerprint: {problem}", file=path)
    for key in TEXTS:
        text = about.get(key, "")
        if not isinstance(text, str) or len(text) > LONGEST_TEXT:
            problem = f"its {key} should be a text of at most {LONGEST_TEXT} characters"
            raise CheckpointError(f"is a damaged fingerprint: {problem}", file=path)


def check_sizes(heads: int, layers: int, file: object) -> None:
    """Refuse more heads or layers than a comparison is made for."""
    limits = (heads, MOST_HEADS, "heads"), (layers, MOST_LAYERS, "layers with attention")
    for count, most, what in limits:
        if count > most:
            raise CheckpointError(f"has {count:,} {what}; at most {most:,} are compared", file=file)


def described(model: Model) -> dict[str, Any]:
    """Describe a checkpoint without its weights."""
    config, checkpoint = model.config, model.checkpoint
    dtypes = sorted(
        {tensor.dtype for i in model.attention_layers for tensor in model.attention_tensors(i)}
    )
    return {
        "name": model.name,
        "family": model.family.name,
        "tower": _tower(model),
        "d_model": config.d_model,
        "layers": config.n_layers,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "dtypes": dtypes,
        "config": digest_of(checkpoint.config),
        "bytes": checkpoint.nbytes,
    }


def _tower(model: Model) -> str:
    """The name of the attention stack that is read; empty if there is no other."""
    names = [name for name, stack in model.stacks.items() if model.stacks.is_read(stack)]
    return names[0] if len(model.stacks) > 1 and names else ""


def _vocabulary(model: Model) -> int | None:
    """The number of tokens, or None if the checkpoint has no token embedding."""
    try:
        return model.embeddings.n_tokens
    except CheckpointError:
        return None


def token_ids(vocabulary: int) -> np.ndarray:
    """Ids of the tokens that W is seen through: runs evenly spread over the first ones."""
    if vocabulary <= TOKENS:
        return np.arange(vocabulary)
    starts = np.linspace(0, TOKEN_RANGE - RUN, TOKENS // RUN).astype(int)
    ids = (starts[:, None] + np.arange(RUN)).ravel()
    return ids[ids < vocabulary]


def _token_basis(model: Model, probes: Probes) -> np.ndarray | None:
    """Directions of the stream from the usual tokens' embeddings (m, d), or None."""
    vocabulary = _vocabulary(model)
    return token_basis(model, token_ids(vocabulary), probes) if vocabulary else None


def token_basis(
    model: Model, ids: np.ndarray, probes: Probes, count: int = COMBINED
) -> np.ndarray | None:
    """Directions of the stream from given tokens' embeddings, nearly orthonormal: (m, d).

    At most `count` tokens are taken one by one; more are combined by random signs.
    """
    rows = model.ends.into_stream(model.embeddings.rows(ids)).astype(np.float64)  # (n, d)
    if not np.isfinite(rows).all():
        return None
    rows -= rows.mean(axis=0)
    combined = rows
    if len(rows) > count or count == COMBINED:  # fingerprints combine however few tokens there are
        combined = signs(count, len(rows), "tokens", probes).astype(np.float64) @ rows  # (m, d)
    values, vectors = np.linalg.eigh(combined @ combined.T)
    size = float(values.mean())
    if not size > 0:
        return None
    whitening = vectors / np.sqrt(np.maximum(values, 0) + SHRINK * size) @ vectors.T  # (m, m)
    return (whitening @ combined).astype(np.float32)


class HeadSketches(NamedTuple):
    """Sketches of N heads, and the places of these heads."""

    layer: np.ndarray  # (N,)
    head: np.ndarray
    kv_head: np.ndarray
    direct: np.ndarray  # (N, 2, K)
    tokens: np.ndarray
    spectra: np.ndarray  # (N, 2, S)
    norms: np.ndarray  # (N, 2)


def layer_sketches(layer: Layer, through: np.ndarray | None, probes: Probes) -> HeadSketches:
    """Sketch a layer's heads."""
    shared = layer.n_heads // layer.n_kv_heads

    def of_group(group: int) -> list[tuple[np.ndarray, ...]]:
        return list(_group_sketches(layer, group, shared, through, probes))

    with np.errstate(over="ignore", invalid="ignore"):
        groups = list(in_threads(of_group, range(layer.n_kv_heads)))
    heads = [head for group in groups for head in group]
    direct, tokens, spectra, norms = (np.stack(part) for part in zip(*heads, strict=True))
    index, layers = np.arange(layer.n_heads), np.full(layer.n_heads, layer.index)
    return HeadSketches(layers, index, index // shared, direct, tokens, spectra, norms)


def _group_sketches(
    layer: Layer, group: int, shared: int, through: np.ndarray | None, probes: Probes
) -> Iterator[tuple[np.ndarray, ...]]:
    """Sketches, spectrum and norm of each head that shares a key-value head: (2, ...)."""
    k, v = layer.k.of(group)[0], layer.v.of(group)[0]  # (d, r)
    of_k = _SketchedFactor(k, "right", through, probes)
    of_v = _SketchedFactor(v, "left", through, probes)
    for h in range(group * shared, (group + 1) * shared):
        head = layer.head(h)
        q, o = head.query_at(0)[0], head.w_o.T
        of_q = _SketchedFactor(q, "left", through, probes)
        of_o = _SketchedFactor(o, "right", through, probes)
        parts = _sketch(of_q, of_k), _sketch(of_v, of_o)
        yield tuple(np.stack(part) for part in zip(*parts, strict=True))


def maps_of(layer: Layer, head: int, through: np.ndarray | None) -> list[Factored]:
    """W_QK and W_VO of a head, in the stream's basis or through tokens (m, d)."""
    h = layer.head(head)
    q, k, v, o = h.query_at(0)[0], h.w_k, h.w_v, h.w_o.T
    if through is not None:
        q, k, v, o = (through @ factor for factor in (q, k, v, o))
    return [Factored(q, k), Factored(v, o)]


class _SketchedFactor:
    """One factor of a head's map, and what a sketch needs of it."""

    def __init__(
        self, factor: np.ndarray, side: str, through: np.ndarray | None, probes: Probes
    ) -> None:
        self.factor, self.probes = factor, probes  # (d, r)
        self.seen = signs(SKETCH, len(factor), side, probes) @ factor  # (K, r)
        self.through: np.ndarray | None = None  # (m, r)
        if through is not None and through.shape[1] == len(factor):
            self.through = through @ factor
        self.triangle = triangle(factor, inner(factor))


def _sketch(left: _SketchedFactor, right: _SketchedFactor) -> tuple[np.ndarray, ...]:
    """Sketches (K,), spectrum (S,) and norm (1,) of left @ right'."""
    direct = np.vecdot(left.seen, right.seen)
    # heads that copy have a trace, however they were initialised
    if left.factor.shape == right.factor.shape:
        n = len(left.factor)
        trace = float(np.vecdot(left.factor, right.factor).sum()) / n
        u, v = (signs(SKETCH, n, side, left.probes) for side in ("left", "right"))
        direct = direct - trace * np.vecdot(u, v)
    tokens = np.empty(0, np.float32)
    if left.through is not None and right.through is not None:
        seen = left.through @ right.through.T  # (m, m)
        seen[np.diag_indices(len(seen))] -= seen.trace() / len(seen)
        u, v = (signs(SKETCH, len(seen), side, left.probes) for side in ("left", "right"))
        tokens = np.vecdot(u @ seen, v)
    s = core_singular_values(left.triangle, right.triangle)
    norm = float(np.sqrt((s**2).sum()))
    spectrum = np.log(np.maximum(s[_spread_out(len(s))] / (norm or 1.0), LEAST))
    in_float32 = spectrum.astype(np.float32), np.array(norm, np.float32)
    return unit_length(direct), unit_length(tokens), *in_float32


def _spread_out(count: int) -> np.ndarray:
    """POINTS places of `count` singular values, evenly spread on a logarithmic scale."""
    places = np.unique(np.geomspace(1, count, POINTS).round().astype(int)) - 1
    steps = np.linspace(0, POINTS - 1, len(places))
    return np.interp(np.arange(POINTS), steps, places).round().astype(int)


def unit_length(sketch: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(sketch, axis=-1, keepdims=True)
    return (sketch / np.where(length > 0, length, 1)).astype(np.float32)


def as_bytes(sketches: np.ndarray) -> np.ndarray:
    """Sketches as signed bytes; their length is 1 and need not be stored."""
    largest = np.abs(sketches).max(axis=-1, keepdims=True, initial=0)
    return np.rint(127 * sketches / np.where(largest > 0, largest, 1)).astype(np.int8)


def is_fingerprint(source: object) -> TypeGuard[str | Path]:
    """True if a source names a fingerprint file."""
    return isinstance(source, str | Path) and str(source).endswith(SUFFIX)
