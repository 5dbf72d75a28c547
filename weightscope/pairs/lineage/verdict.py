"""Judge which bases share attention heads with a suspect, and why some stay undecided.

Of a folder of fingerprints only those most like the suspect, by sums over heads, are compared.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.core.engine import Engine
from weightscope.core.errors import CheckpointError, one_line, printable
from weightscope.core.files import writing
from weightscope.core.progress import bar
from weightscope.model.model import Model, as_model
from weightscope.model.sources import Source
from weightscope.pairs.changes.token_order import match_tokens, would_show
from weightscope.pairs.lineage.matching import (
    ROUTES,
    SURE,
    Match,
    log_tail,
    match_through,
    matches,
    without_smallest,
)
from weightscope.pairs.lineage.probes import PUBLIC, Probes, drawn_probes
from weightscope.pairs.lineage.sketches import (
    POINTS,
    SUFFIX,
    Sketches,
    check_probes,
    fingerprint,
    is_fingerprint,
    load,
    stored,
)

# nearest fingerprints of a registry, whose heads are compared, and ties with the last of them
COMPARED = 8
TIED = 0.02  # difference of likeness or distance that makes a tie
TIES = 64  # fingerprints that are compared at most
OF_LAYERS = ("direct", "tokens", "spectra")


def prints_in(source: str | Path) -> list[Path]:
    """Fingerprint files in a folder, by name; none if it holds a checkpoint."""
    folder = Path(source)
    if source == "" or not folder.is_dir() or (folder / "config.json").exists():
        return []
    return sorted(folder.glob(f"*{SUFFIX}"))


def make_prints(
    sources: Sequence[Source],
    names: Sequence[str],
    out: Path,
    engine: Engine,
    probes: Probes = PUBLIC,
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Write a fingerprint of every source; yield its name, its problem, and what was read."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    tasks = [
        (name, _print_of, (source, probes)) for source, name in zip(sources, names, strict=True)
    ]
    for ended in engine.each(tasks):
        if not isinstance(ended.error, CheckpointError | None):
            raise ended.error
        problem = "" if ended.error is None else one_line(ended.error)
        read: dict[str, Any] = {"files": []}
        if ended.error is None and isinstance(ended.value, Sketches):
            ended.value.save(out / f"{ended.key}{SUFFIX}")
            read = ended.value.read
        yield ended.key, problem, read


def _print_of(source: Source, probes: Probes) -> Sketches:
    return replace(fingerprint(source.open(), probes), source=None)


class NearestPrints(NamedTuple):
    """The fingerprints in a folder that are most like a suspect."""

    bases: list[tuple[str, Sketches]]  # each with its file name
    unread: list[str]  # reasons for skipping others, each beginning with a name


def nearest(suspect: Sketches, files: Sequence[Path], most: int = COMPARED) -> NearestPrints:
    """Find the fingerprints most like a suspect, by sums of sketches and by spectra.

    Damaged files are skipped.

    Raises
    ------
    CheckpointError
        No file could be read; the message is about the first.
    """
    likeness, distance, problems = _compared_by_layers(suspect, files)
    bases: dict[int, Sketches] = {}
    for scores in (-likeness, distance):
        taken, last = 0, np.inf
        for k in np.argsort(scores, kind="stable").tolist():
            if k in problems:
                continue
            if taken >= most and (scores[k] - last > TIED or taken >= TIES):
                break
            try:
                bases[k] = bases.get(k) or load(files[k], suspect.probes)
            except CheckpointError as error:  # takes no place from others
                problems[k] = error
                continue
            taken += 1
            if taken <= most:
                last = scores[k]
    if not bases:
        raise problems[min(problems)]
    read = [(str(files[k]), sketches) for k, sketches in bases.items()]
    return NearestPrints(read, [str(problems[k]) for k in sorted(problems)])


def _compared_by_layers(
    suspect: Sketches, files: Sequence[Path]
) -> tuple[np.ndarray, np.ndarray, dict[int, CheckpointError]]:
    """Likeness and distance of each file's layers to the suspect's, and problems by place."""
    likeness, distance = np.full(len(files), -np.inf), np.full(len(files), np.inf)
    problems: dict[int, CheckpointError] = {}
    mine = {name: suspect.of_layers(name) for name in OF_LAYERS}
    with bar(files, "fingerprints", "file") as shown:
        for k, file in enumerate(shown):
            try:
                theirs = _of_layers(file, suspect.probes)
            except CheckpointError as error:
                problems[k] = error
                continue
            likeness[k] = 0
            for name in ("direct", "tokens"):
                x, y = mine[name], theirs[name]
                if x.shape[1] and x.shape[1] == y.shape[1]:
                    likeness[k] = max(likeness[k], float((x @ y.T).max(axis=1).mean()))
            apart = np.abs(mine["spectra"][:, None] - theirs["spectra"][None]).mean(axis=2)
            distance[k] = apart.min(axis=1).mean()
    return likeness, distance, problems


def _of_layers(path: Path, probes: Probes) -> dict[str, np.ndarray]:
    """One row per layer of a fingerprint, without reading its heads."""
    names = [f"layers_{name}" for name in OF_LAYERS]
    about, arrays, _ = stored(path, *names)
    check_probes(about, probes, path)
    rows = dict(zip(OF_LAYERS, arrays, strict=True))
    are_tables = all(array.ndim == 2 and len(array) for array in rows.values())
    if not are_tables or rows["spectra"].shape[1] != 2 * POINTS:
        problem = "is a damaged fingerprint: its layers have the wrong shape"
        raise CheckpointError(problem, file=path)
    for name in ("direct", "tokens"):
        rows[name] /= np.maximum(np.linalg.norm(rows[name], axis=1, keepdims=True), 1e-30)
    return rows


DOUBTFUL = 4.0  # z from which a likeness is no longer called chance
OTHER_VOCABULARY = 0.1  # relative difference of sizes beyond which two vocabularies differ
NEARER = 3.0  # factor by which another base has to be nearer (1 - likeness) than the first
CLEARLY = 0.01  # likeness by which it has to be more alike, too
SILENT = 0.5  # share of maps that must not be zero for a checkpoint to be compared
WIDTHS_DIFFER = (
    "the widths differ, and heads cannot be compared through tokens without a common vocabulary, "
    "so shared heads of another width would not show"
)
ALL_BUT_SMALLEST = (
    "singular values of heads agree but for the smallest, as after a change of basis and a small "
    "change more"
)
TOKENS_TOO_ALIKE = (
    "its token embeddings are too much alike to detect a change of basis if tokens were renumbered "
    "too"
)
Base = Model | Sketches | str | Path


class Related(NamedTuple):
    """A base that the suspect shares heads with, and the match that shows it."""

    base: Sketches
    match: Match

    @property
    def weight(self) -> float:
        """Sum of likeness over layers, divided by their number; any sketch ranks above spectra."""
        match = self.match
        share = sum(j is not None for j in match.layers) / len(match.layers)
        return match.mean * share + (match.route != "spectra")


@dataclass(frozen=True, eq=False)
class ComparedBase:
    """One base, and what each route says about it."""

    base: Sketches
    matches: dict[str, Match]
    match: Match | None  # best match; None if strangers are this alike
    doubt: str = ""  # reason why a common origin could have been missed, if none was found

    @property
    def log_p(self) -> float:
        """Logarithm of the smallest probability over routes."""
        return min((match.log_p for match in self.matches.values()), default=0.0)


def print_of(source: Base, probes: Probes = PUBLIC) -> Sketches:
    """The fingerprint of a checkpoint, or the one in a file, made with these probes."""
    if isinstance(source, Sketches):
        if source.probes == probes:
            return source
        if source.source is None:
            raise CheckpointError("is a fingerprint made with other probes", file=source.name)
        return fingerprint(source.source, probes).called(source.name)
    return load(source, probes) if is_fingerprint(source) else fingerprint(source, probes)


def model_of(source: Base) -> Model | None:
    """The checkpoint behind a source; None if it is a fingerprint alone."""
    if isinstance(source, Sketches):
        return source.source
    return None if is_fingerprint(source) else as_model(source)


class Candidates(NamedTuple):
    """Pairs of a suspect's and a base's sketches by the same probes, and what was not compared."""

    pairs: list[tuple[Sketches, Sketches]]
    looked_at: int  # number of bases, with all fingerprints of folders
    unread: list[str]  # reasons for skipping fingerprints of a folder
    probes: Probes  # signs of the pairs whose weights are both there


def candidates(
    suspect: Base, bases: Sequence[Base], key: Probes = PUBLIC, nonce: str | None = None
) -> Candidates:
    """The bases to compare with; from a folder of fingerprints, only the nearest.

    Where the weights of both are there, both are sketched with signs drawn for them. Fingerprints
    have public signs, or signs drawn with a key.
    """
    paths = {k: base for k, base in enumerate(bases) if isinstance(base, str | Path)}
    folders = {k: files for k, path in paths.items() if (files := prints_in(path))}
    mine = model_of(suspect)
    single = {k: base for k, base in enumerate(bases) if k not in folders}
    models = {k: model for k, base in single.items() if (model := model_of(base))}
    drawn = drawn_probes([mine, *models.values()], nonce) if mine and models else key
    needs_key = not drawn.nonce or len(models) < len(bases)
    by_key = print_of(suspect, key) if needs_key else None
    by_drawn = print_of(suspect, drawn) if drawn.nonce else by_key
    pairs: list[tuple[str, Sketches | None, Sketches]] = []  # name in the list, suspect, base
    looked_at, unread = 0, []
    shown = bar(bases, "bases", "base") if len(bases) > 1 else bases
    for k, base in enumerate(shown):
        files = folders.get(k, [])
        looked_at += len(files) or 1
        if files and by_key is not None:
            kept = nearest(by_key, files)
            pairs += [(file, by_key, sketches) for file, sketches in kept.bases]
            unread += kept.unread
        elif k in models:
            sketches = print_of(base, drawn)
            pairs.append((_given_name(base, sketches), by_drawn, sketches))
        else:
            sketches = print_of(base, key)
            pairs.append((_given_name(base, sketches), by_key, sketches))
    times = Counter(base.name for _, _, base in pairs)
    called = [
        (ours, base if times[base.name] == 1 else base.called(given))
        for given, ours, base in pairs
        if ours is not None
    ]
    return Candidates(called, looked_at, unread, drawn)


def _given_name(base: Base, sketches: Sketches) -> str:
    """A base's name as it was given, which tells bases of one name apart."""
    if isinstance(base, Sketches):
        return sketches.name
    if isinstance(base, Model):
        return str(base.checkpoint.given or base.source)
    return str(base)


def judge(suspect: Sketches, base: Sketches) -> ComparedBase:
    """Compare the fingerprints of a suspect and a base, without reading weights."""
    by_route = matches(suspect, base)
    spectra = by_route["spectra"]
    if not any(by_route.get(route, spectra).is_sure for route in ("direct", "tokens")):
        order = _renumbered(suspect, base)
        if order is not None:
            by_route["tokens"] = order
    by_sketch = [
        Related(base, by_route[route])
        for route in ("direct", "tokens")
        if route in by_route and by_route[route].is_sure
    ]
    if not by_sketch and spectra.is_sure:
        by_sketch = [Related(base, spectra)]
    if not by_sketch:
        return ComparedBase(base, by_route, None, _doubt(suspect, base, by_route))
    # If both routes are sure, tokens count only if they show clearly more.
    best = max(by_sketch, key=lambda each: (round(each.weight, 1), each.match.route == "direct"))
    return ComparedBase(base, by_route, best.match)


def _has_tokens(sketches: Sketches) -> bool:
    """True if the embeddings of a checkpoint can be read."""
    return sketches.source is not None and bool(sketches.about["vocabulary"])


def _renumbered(suspect: Sketches, base: Sketches) -> Match | None:
    """Match through renumbered tokens, if their embeddings show the counterparts."""
    if suspect.about["d_model"] != base.about["d_model"]:
        return None
    if not _has_tokens(suspect) or not _has_tokens(base):
        return None
    assert suspect.source is not None and base.source is not None
    order = match_tokens(suspect.source, base.source)
    return match_through(suspect, base, order) if order.is_found else None


def _doubt(suspect: Sketches, base: Sketches, by_route: dict[str, Match]) -> str:
    """The reason why shared heads could have been missed; empty if they would have shown."""
    zeros = [each.name for each in (suspect, base) if each.direct.any(axis=-1).mean() < SILENT]
    if zeros:
        return f"most heads of {printable(zeros[0])} are zero, so there is nothing to compare"
    towers = [str(each.about.get("tower", "")) for each in (suspect, base)]
    if all(towers) and towers[0] != towers[1]:
        names = [printable(tower) for tower in towers]
        return f"the suspect's {names[0]} tower was compared with the base's {names[1]} tower"
    everywhere = [
        route
        for route, match in by_route.items()
        if match.log_p < log_tail(SURE) and match.is_everywhere
    ]
    if everywhere:
        alike = f"{ROUTES[everywhere[0]]} are alike even if they are not counterparts"
        return f"{alike}, which may hide a common origin"
    low = [route for route, match in by_route.items() if match.log_p < log_tail(DOUBTFUL)]
    if low:
        return f"{ROUTES[low[0]]} are more alike than chance allows, but less than shared heads are"
    sizes = [about["vocabulary"] for about in (suspect.about, base.about)]
    same_tokens = (
        all(sizes)
        and "tokens" in by_route
        and abs(sizes[0] - sizes[1]) <= OTHER_VOCABULARY * max(sizes)
    )
    width = suspect.about["d_model"]
    if width == base.about["d_model"] and "direct" not in by_route:
        return f"the stream has {width} dimensions, too few to tell heads apart"
    if "direct" not in by_route and not same_tokens:
        return WIDTHS_DIFFER
    if without_smallest(suspect, base).is_sure:
        return ALL_BUT_SMALLEST
    if suspect.source is None or base.source is None:
        return ""  # undecided anyway
    if not (_has_tokens(suspect) and _has_tokens(base)):
        missed = "so a change of basis with a small change of heads would not show"
        return f"{without_tokens(suspect, base)}, {missed}"
    return "" if would_show(suspect.source) else TOKENS_TOO_ALIKE


def without_tokens(suspect: Sketches, base: Sketches) -> str:
    """A sentence that names checkpoints without token embeddings."""
    lacking = [printable(each.name) for each in (suspect, base) if not _has_tokens(each)]
    verb = "has" if len(lacking) == 1 else "have"
    return f"{' and '.join(lacking)} {verb} no token embeddings"


def sources(suspect: Sketches, related: Sequence[Related]) -> list[Related | None]:
    """The base that each layer comes from: the first one, unless another is clearly nearer."""
    of_layers: list[Related | None] = []
    for i in range(len(suspect.layers)):
        best, likeness = None, 0.0
        for each in related:
            j = each.match.layers[i]
            if j is None:
                continue
            alike = float(each.match.likeness[i, j])
            is_nearer = NEARER * (1 - alike) < 1 - likeness and alike > likeness + CLEARLY
            if best is None or is_nearer:
                best, likeness = each, alike
        of_layers.append(best)
    return of_layers
