"""A checkpoint's fingerprint: random sketches of every head's W_QK and W_VO, and their spectra.

A sketch of W is K numbers y_k = u_k' W v_k with u_k, v_k random signs, the same for every
checkpoint of a width. Over their choice E[sum_k y_k y'_k] / K = <W, W'>, so the cosine of two
sketches estimates the cosine of two matrices, with an error of about 1 / sqrt(K). A sketch
identifies a head, but W cannot be recovered from it. Which signs: see `probes`.

Each map has two sketches and a spectrum; each survives different changes of a checkpoint:

    direct      u, v in the basis of the stream; survives training, rounding and merging
    tokens      u, v combined from some token embeddings; also survives a rotation or permutation of the stream
    spectra     singular values over the norm; survive every change of basis
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

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
TOKENS, RUN = 4096, 256  # tokens whose embeddings are combined, and how many have consecutive ids
TOKEN_RANGE = 16384  # they are among the first ids, which a cut vocabulary keeps
COMBINED = 32  # combinations of tokens that span what W is seen through
FINELY = 256  # as many where the weights of both are at hand; fewer tokens are taken as they are
SHRINK = 0.1  # of their mean square, added before they are made orthonormal
LARGEST_PRINT = 64 << 20  # bytes of a fingerprint file; a 70B model makes 3 MB
MOST_HEADS = 32_768  # of all layers; the largest published model has 16,128
MOST_LAYERS = 512  # with attention; the largest published model has 126
LONGEST_TEXT = 1_000  # characters of a name in a fingerprint file
STORED = {  # arrays of a file: safetensors' dtype and NumPy's
    **dict.fromkeys(("direct", "tokens", "layers_direct", "layers_tokens"), ("I8", "i1")),
    **dict.fromkeys(("spectra", "layers_spectra"), ("F16", "<f2")),
    "norms": ("F32", "<f4"),
    "heads": ("I32", "<i4"),
}
SIZES = ("d_model", "layers", "heads", "kv_heads", "vocabulary")  # in every description
NO_TOKENS = ("vocabulary", None)  # of a checkpoint without a token embedding
OTHERS = {False: "the public probes", True: "this key"}
LAYERS_FOLLOW = (
    # 1 - cosine, or distance of logarithms, up to which a layer's row is the sum of its heads,
    # rounded
    0.05
)
LEAST = 1e-6  # of a singular value relative to the norm: float32's rounding


@dataclass(frozen=True, eq=False, repr=False)
class Sketches(ShowsShapes):
    """A checkpoint's fingerprint, of N heads in L layers."""

    # name, sizes, dtypes, digests of config and tokenizer; shown separately, never evidence
    about: dict[str, Any]
    layer: np.ndarray  # (N,)
    head: np.ndarray
    kv_head: np.ndarray
    direct: np.ndarray  # (N, 2, K) sketches of W_QK and W_VO, of unit length
    tokens: np.ndarray  # the same through token embeddings; (N, 2, 0) without
    spectra: np.ndarray  # (N, 2, S) logarithms of singular values over the Frobenius norm
    norms: np.ndarray  # (N, 2) Frobenius norms
    # the model, if the fingerprint was just computed from one
    source: Model | None = field(default=None, repr=False)
    probes: Probes = field(default=PUBLIC, repr=False)  # where its signs come from
    # the files that it was made from; see `source_of`
    read: dict[str, Any] = field(default_factory=dict, repr=False)

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
            # (L, 2 S)
            return np.stack([values[self.of_layer(i)].mean(axis=0).ravel() for i in self.layers])
        weighted = values * self.norms[..., None].astype(np.float64)  # their sum may exceed float32
        sums = [weighted[self.of_layer(i)].sum(axis=0).ravel() for i in self.layers]
        return unit_length(np.stack(sums))  # (L, 2 K)

    def through(self, ids: np.ndarray) -> np.ndarray:
        """Sketches through the embeddings of these tokens (N, 2, K), from the weights."""
        assert self.source is not None
        model, basis = self.source, token_basis(self.source, ids, self.probes)
        layers = bar(model.attention_layers, "heads through tokens", "layer")
        return np.concatenate(
            [layer_sketches(model.layer(i), basis, self.probes)[4] for i in layers]
        )

    def save(self, path: str | Path) -> None:
        """Write the fingerprint as a safetensors file, whole or not at all."""
        from safetensors.numpy import save

        arrays = {name: as_bytes(getattr(self, name)) for name in ("direct", "tokens")}
        arrays |= {
            f"layers_{name}": as_bytes(self.of_layers(name)) for name in ("direct", "tokens")
        }
        arrays |= {"spectra": self.spectra.astype(np.float16)}
        arrays |= {"layers_spectra": self.of_layers("spectra").astype(np.float16)}
        arrays |= {
            "norms": self.norms,
            "heads": np.stack([self.layer, self.head, self.kv_head]).astype(np.int32),
        }
        with new_file(Path(path)) as file:
            file.write(
                save(arrays, {"weightscope": json.dumps({"version": VERSION, **self.about})})
            )


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
    >>> from weightscope.pairs.lineage.sketches import fingerprint
    >>> sketches = fingerprint("embedded")
    >>> sketches.direct.shape, sketches.layers
    ((16, 2, 128), [0, 1])
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
    layer, head, kv_head, direct, tokens, spectra, norms = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    if len(broken := np.unique(layer[~np.isfinite(norms).all(axis=1)])):
        problem = f"{indexed('layer', broken.tolist())}: W_QK or W_VO of a head exceeds float32, and cannot be compared"
        raise CheckpointError(problem, file=model.name)
    about = described(model) | {
        "vocabulary": _vocabulary(model),
        "heads_sha256": digest_of_heads(model),
        "probes": probes.name,
    }
    return Sketches(
        about,
        layer,
        head,
        kv_head,
        direct,
        tokens,
        spectra,
        norms,
        model,
        probes,
        source_of(model.checkpoint),
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
    shapes = {
        "heads": (3, n),
        "direct": (n, 2, SKETCH),
        "spectra": (n, 2, POINTS),
        "norms": (n, 2),
        "tokens": (n, 2, SKETCH if tokens.shape[2:] != (0,) else 0),
    }
    arrays = {
        "heads": heads,
        "direct": direct,
        "tokens": tokens,
        "spectra": spectra,
        "norms": norms,
    }
    wrong = [name for name, shape in shapes.items() if arrays[name].shape != shape]
    if not wrong and n:
        wrong = ["heads"] if heads.min() < 0 else ["norms"] if norms.min() < 0 else []
    if wrong or not n:
        raise CheckpointError(
            f"is a damaged fingerprint ({', '.join(wrong) or 'no heads'})", file=path
        )
    layer, head, kv_head = heads.astype(np.int64)
    check_sizes(n, len(np.unique(layer)), path)
    check_probes(about, probes, path)
    file.read_digest()
    read = {"name": printable(path), "files": [file_record(file)]}
    sketches = Sketches(
        about,
        layer,
        head,
        kv_head,
        unit_length(direct),
        unit_length(tokens),
        spectra,
        norms,
        probes=probes,
        read=read,
    )
    _check_layers(sketches, path)
    return sketches


def check_probes(about: dict[str, Any], probes: Probes, path: Path) -> None:
    """Refuse a fingerprint made with other signs: its numbers mean nothing to others."""
    if about.get("probes", "") == probes.name:
        return
    made = "with a probe key" if about.get("probes") else "without a probe key"
    how = (
        "give that key"
        if about.get("probes")
        else "leave the key out, or make the fingerprint again with it"
    )
    raise CheckpointError(
        f"is a fingerprint made {made}, which cannot be read with {OTHERS[bool(probes.name)]}; {how}",
        file=path,
    )


def _check_layers(sketches: Sketches, path: Path) -> None:
    """Refuse layers' rows that are not sums over the heads: registries are searched by them."""
    names = ("direct", "tokens", "spectra")
    rows = dict(zip(names, stored(path, *(f"layers_{name}" for name in names))[1], strict=True))
    for name in names:
        follow, given = sketches.of_layers(name), rows[name]
        if follow.shape == given.shape:
            apart = (
                np.abs(follow - given)
                if name == "spectra"
                else 1 - np.vecdot(follow, unit_length(given))
            )
            sizes = (
                np.linalg.norm(follow, axis=-1) > 0
                if name != "spectra"
                else np.ones(len(follow), bool)
            )
            if not apart[sizes].size or apart[sizes].max() <= LAYERS_FOLLOW:
                continue
        problem = (
            f"its layers_{name} do not follow from its heads; it was changed after it was made"
        )
        raise CheckpointError(f"is a damaged fingerprint: {problem}", file=path)


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
        about = parse_json(
            metadata.get("weightscope", "{}").encode(), file=None, what="its description "
        )
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
        entry, rows = entries[name], (entries[name].shape or (1,))[-1 if name == "heads" else 0]
        check_sizes(*((0, rows) if name.startswith("layers_") else (rows, 0)), path)
        raw = file.bytes_of(entry, 0, entry.stop - entry.start)
        array = raw.view(STORED[name][1]).reshape(entry.shape)
        arrays.append(array if name == "heads" else array.astype(np.float32))
        if not np.isfinite(arrays[-1]).all():
            raise CheckpointError(
                f"is a damaged fingerprint ({name}: values are not finite)", file=path
            )
    return about, arrays, file


def _check_description(about: dict[str, Any], path: Path) -> None:
    """Refuse a description that no fingerprint has; all of it is shown."""
    if not isinstance(about.get("name"), str):
        raise CheckpointError("is not a fingerprint: it does not describe a checkpoint", file=path)
    if about.pop("version", None) != VERSION:
        problem = f"is a fingerprint of another version; make a new one with `weightscope fingerprint` ({VERSION})"
        raise CheckpointError(problem, file=path)
    sizes = {key: about.get(key, "") for key in SIZES}
    wrong = [
        key
        for key, size in sizes.items()
        if (key, size) != NO_TOKENS and not (type(size) is int and 1 <= size <= LARGEST)
    ]
    if wrong:
        problem = f"{', '.join(wrong)} should be whole numbers from 1 to {LARGEST:,}"
        raise CheckpointError(f"is a damaged fingerprint: {problem}", file=path)
    for key in ("name", "family", "tower", "config", "probes", "heads_sha256"):
        if not isinstance(text := about.get(key, ""), str) or len(text) > LONGEST_TEXT:
            problem = f"its {key} should be a text of at most {LONGEST_TEXT} characters"
            raise CheckpointError(f"is a damaged fingerprint: {problem}", file=path)


def check_sizes(heads: int, layers: int, file: object) -> None:
    """Refuse more heads or layers than a comparison is made for."""
    for count, most, what in (
        (heads, MOST_HEADS, "heads"),
        (layers, MOST_LAYERS, "layers with attention"),
    ):
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
    names = [name for name, stack in model.stacks.items() if model.is_read(stack)]
    return names[0] if len(model.stacks) > 1 and names else ""


def _vocabulary(model: Model) -> int | None:
    """The number of tokens, or None if the checkpoint has no token embedding."""
    try:
        return model.embeddings.n_tokens
    except CheckpointError:
        return None


def token_ids(vocabulary: int) -> np.ndarray:
    """Ids of the tokens that W is seen through: runs evenly spread over the first ones."""
    starts = np.linspace(0, TOKEN_RANGE - RUN, TOKENS // RUN).astype(int)
    ids = (starts[:, None] + np.arange(RUN)).ravel()
    return np.arange(vocabulary) if vocabulary <= TOKENS else ids[ids < vocabulary]


def _token_basis(model: Model, probes: Probes) -> np.ndarray | None:
    """Directions of the stream from the usual tokens' embeddings (m, d), or None."""
    vocabulary = _vocabulary(model)
    if not vocabulary:
        return None
    return token_basis(model, token_ids(vocabulary), probes)


def token_basis(
    model: Model, ids: np.ndarray, probes: Probes, count: int = COMBINED
) -> np.ndarray | None:
    """Directions of the stream from given tokens' embeddings, nearly orthonormal: (m, d).

    At most `count` tokens are taken one by one; more are combined by random signs.
    """
    rows = model.into_stream(model.embeddings.rows(ids)).astype(np.float64)  # (n, d)
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


def layer_sketches(
    layer: Layer, through: np.ndarray | None, probes: Probes
) -> tuple[np.ndarray, ...]:
    """Layer, head and key-value head, sketches, spectra and norms of a layer's heads."""
    shared = layer.n_heads // layer.n_kv_heads
    with np.errstate(over="ignore", invalid="ignore"):
        groups = list(
            in_threads(
                lambda g: list(_group_sketches(layer, g, shared, through, probes)),
                range(layer.n_kv_heads),
            )
        )
    heads = [head for group in groups for head in group]
    direct, tokens, spectra, norms = (np.stack(part) for part in zip(*heads, strict=True))
    index = np.arange(layer.n_heads)
    return (
        np.full(layer.n_heads, layer.index),
        index,
        index // shared,
        direct,
        tokens,
        spectra,
        norms,
    )


def _group_sketches(
    layer: Layer, group: int, shared: int, through: np.ndarray | None, probes: Probes
) -> Iterator[tuple[np.ndarray, ...]]:
    """Sketches, spectrum and norm of each head that shares a key-value head: (2, ...)."""
    k, v = layer.k.of(group)[0], layer.v.of(group)[0]  # (d, r)
    of_k, of_v = (
        _SketchedFactor(k, "right", through, probes),
        _SketchedFactor(v, "left", through, probes),
    )
    for h in range(group * shared, (group + 1) * shared):
        head = layer.head(h)
        q, o = head.query_at(0)[0], head.w_o.T
        pairs = (
            (_SketchedFactor(q, "left", through, probes), of_k),
            (of_v, _SketchedFactor(o, "right", through, probes)),
        )
        parts = [_sketch(left, right) for left, right in pairs]
        yield tuple(np.stack(part) for part in zip(*parts, strict=True))


def maps_of(layer: Layer, head: int, through: np.ndarray | None) -> list[Factored]:
    """W_QK and W_VO of a head, in the stream's basis or through tokens (m, d)."""
    h = layer.head(head)
    factors = (h.query_at(0)[0], h.w_k), (h.w_v, h.w_o.T)
    return [
        Factored(*(side if through is None else through @ side for side in pair))
        for pair in factors
    ]


class _SketchedFactor:
    """One factor of a head's map, and what a sketch needs of it."""

    def __init__(
        self, factor: np.ndarray, side: str, through: np.ndarray | None, probes: Probes
    ) -> None:
        self.factor, self.probes = factor, probes  # (d, r)
        self.seen = signs(SKETCH, len(factor), side, probes) @ factor  # (K, r)
        # (m, r)
        self.through = (
            None if through is None or through.shape[1] != len(factor) else through @ factor
        )
        self.triangle = triangle(factor, inner(factor))


def _sketch(left: _SketchedFactor, right: _SketchedFactor) -> tuple[np.ndarray, ...]:
    """Sketches (K,), spectrum (S,) and norm (1,) of left @ right'."""
    direct = np.vecdot(left.seen, right.seen)
    # heads that copy have a trace, however they were initialised
    if left.factor.shape == right.factor.shape:
        n = len(left.factor)
        trace = float(np.vecdot(left.factor, right.factor).sum()) / n
        direct = direct - trace * np.vecdot(
            *(signs(SKETCH, n, side, left.probes) for side in ("left", "right"))
        )
    tokens = np.empty(0, np.float32)
    if left.through is not None and right.through is not None:
        seen = left.through @ right.through.T  # (m, m)
        seen[np.diag_indices(len(seen))] -= seen.trace() / len(seen)
        u, v = (signs(SKETCH, len(seen), side, left.probes) for side in ("left", "right"))
        tokens = np.vecdot(u @ seen, v)
    s = core_singular_values(left.triangle, right.triangle)
    norm = float(np.sqrt((s**2).sum()))
    places = np.unique(np.geomspace(1, len(s), POINTS).round().astype(int)) - 1
    places = (
        np.interp(np.arange(POINTS), np.linspace(0, POINTS - 1, len(places)), places)
        .round()
        .astype(int)
    )
    spectrum = np.log(np.maximum(s[places] / (norm or 1.0), LEAST))
    return (
        unit_length(direct),
        unit_length(tokens),
        spectrum.astype(np.float32),
        np.array(norm, np.float32),
    )


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
