"""The identity of a checkpoint: a digest of every tensor under its role, settings, tokenizer."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, batches, blocks_of
from weightscope.checkpoint.checkpoint import StoredTensor, Tensor
from weightscope.checkpoint.config import LONGEST_KEY, MAX_BYTES, parse_json, read_small
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import hand_back, in_threads, keep_freed
from weightscope.core.errors import CheckpointError, counted, naming, printable
from weightscope.core.progress import bar, progress_shown
from weightscope.core.results import Result
from weightscope.core.tables import as_json
from weightscope.heads.tensors.measure import why_unread
from weightscope.model.config.computed import Stated
from weightscope.model.layers.read_layer import NO_WEIGHTS
from weightscope.model.model import Model, TensorsOnly, open_tensors
from weightscope.model.rows.names import OF_MODEL, OF_WRAPPERS, NamedTensor, Tensors
from weightscope.pairs.changes.counterparts import unchecked_tensors
from weightscope.pairs.deeds.change import TELLING
from weightscope.pairs.deeds.rounding import shows_rounding
from weightscope.pairs.identity.sketch import SUMS, Sketch, Sketching
from weightscope.pairs.identity.wsid import (
    BF16,
    KINDS,
    ROUNDINGS,
    VERSION,
    Digest,
    digest,
    left_out,
    wsid,
)
from weightscope.pairs.same.companions import file_digests
from weightscope.pairs.same.config_and_tokens import has_packing, settings_of, token_digests
from weightscope.pairs.same.multiplied import multiplied

SUFFIX = ".id.json"
HEX = re.compile(r"[0-9a-f]{64}")
MASK = re.compile(r"\.(bias|causal_mask)$")  # GPT-2's, GPT-J's
MOST_AXES, LARGEST_AXIS = 8, 1 << 48
LARGEST_NORM, LARGEST_SUM = 1e50, 10**15
HALF = 16.0  # bits a value; a copy in fewer is quantised
SIZE = 4  # times the usual limits of JSON: a mixture has a hundred thousand tensors


class Stored(NamedTuple):
    """The place of a tensor in its file."""

    name: str
    role: str
    layer: int | None
    expert: int | None
    bits: float  # bits a value, with the scales stored for it
    shows: bool = True  # its dtype or its values show that it was rounded, if it was


@dataclass(frozen=True, eq=False, repr=False)
class Identity(Result):
    """Digests of a model's values by role, its settings and its tokenizer.

    `tensors` has a digest for each label (a role and its place), experts and fused tensors apart.
    """

    name: str
    tensors: Mapping[str, Digest]
    sketches: Mapping[str, Sketch | None]
    settings: Stated
    container: str  # "gguf" or "safetensors"
    tokenizer: Mapping[str, str]  # part -> digest of its meaning; empty without one
    files: Mapping[str, str]  # SHA-256 of the chat template and of code that config.json names
    provenance: Provenance
    stored: Mapping[str, Stored] = field(default_factory=dict)  # empty if read from a file

    @property
    def about(self) -> str:
        """The name and the identity."""
        return f"{self.name}: {self.wsid}"

    @cached_property
    def wsid(self) -> str:
        """`wsid1:` and a SHA-256: equal for two files of the same values, whatever holds them."""
        return wsid(self.tensors)

    @property
    def ties(self) -> bool | None:
        """True if the config ties the head to the tokens; None if it does not say so."""
        key, settings = "tie_word_embeddings", self.settings
        if key not in settings.present:
            key = settings.kind.removesuffix("model_type") + key
        return None if self.container == "gguf" else settings.values.get(key)

    @property
    def overwritten_head(self) -> bool:
        """True if the config ties the head and the file holds another."""
        has = {"tokens", "unembedding"} <= self.tensors.keys() - self.left_out.keys()
        return has and self.ties is True

    @property
    def says_packed(self) -> bool:
        """True if the config says how weights are packed, and none is, as far as is known."""
        bits = [place.bits for place in self.stored.values()]
        return bool(bits) and min(bits) >= HALF and has_packing(self.settings)

    @cached_property
    def left_out(self) -> dict[str, str]:
        """Tensors that are no part of it, by label, and why."""
        reasons = {label: left_out(label, self.tensors) for label in self.tensors}
        return {label: reason for label, reason in reasons.items() if reason}

    @property
    def lead(self) -> str:
        """The identity in one line, and the number of tensors behind it."""
        held = Counter(each.exact[0] for each in self.tensors.values())
        kinds = ", ".join(f"{held[kind]:,} {kind}" for kind in KINDS if held[kind])
        number = counted(len(self.tensors) - len(self.left_out), "tensor")
        rest = f"; {len(self.left_out)} left out" if self.left_out else ""
        unnamed = sum(place.role == place.name for place in self.stored.values())
        if unnamed:
            rest += f"; {unnamed} without a role count by their names, which containers change"
        return f"{self.wsid} is the identity of {printable(self.name)}: {number} ({kinds}){rest}."

    def printed(self) -> list[str]:
        """The lines that the terminal shows."""
        reasons = Counter(self.left_out.values())
        return [self.lead, *(f"Left out, {n:,}: {reason}." for reason, n in reasons.items())]

    def as_json(self) -> dict[str, Any]:
        """The content of the file that `weightscope id --out` writes."""
        return dict(
            as_json(
                self.provenance.envelope(self.lead)
                | {
                    "name": self.name,
                    "wsid": self.wsid,
                    "tensors": {
                        label: {
                            "shape": each.shape,
                            "exact": " ".join(each.exact),
                            **each.sha256,
                            "sketch": _in_text(self.sketches[label]),
                        }
                        for label, each in sorted(self.tensors.items())
                    },
                    "left_out": self.left_out,
                    "container": self.container,
                    "settings": self.settings.as_json(),
                    "tokenizer": self.tokenizer,
                    "files": self.files,
                }
            )
        )

    def statement(self) -> dict[str, Any]:
        """The identity as a statement of in-toto, to sign."""
        kind, digest = self.wsid.split(":")
        return {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": printable(self.name), "digest": {kind: digest}}],
            "predicateType": "https://weightscope/identity/v1",
            "predicate": self.as_json(),
        }


def identity(source: Model | TensorsOnly | str | Path, *, progress: bool | None = None) -> Identity:
    """Compute a checkpoint's identity: every value is read once.

    Memory: a few tensors.

    Parameters
    ----------
    source : Model, str or Path
        A model, or what `open_model` opens.
    progress : bool, optional
        Show a bar; by default in a notebook only.

    Returns
    -------
    Identity

    Raises
    ------
    CheckpointError
        A tensor cannot be read.

    Examples
    --------
    >>> import weightscope as ws
    >>> ws.identity("embedded").wsid
    'wsid1:27c847e8294f1e9cc49e765af261f9188c0b649810b1f86472b40fc576941174'
    """
    model = source
    if isinstance(model, str | Path):
        with naming(model):
            model = open_tensors(model)
    model = multiplied(model)
    keep_freed()
    by_label: dict[str, _Made] = {}
    with progress_shown(progress), np.errstate(all="ignore"), bar(what="digests") as shown:
        for label, made in in_threads(_made, _leaves(model), ahead=2):
            by_label[label] = made
            shown.update()
    hand_back()
    return Identity(
        name=model.name,
        tensors={label: made.digest for label, made in by_label.items()},
        sketches={label: made.sketch for label, made in by_label.items()},
        settings=settings_of(model),
        container="gguf" if model.checkpoint.is_gguf else "safetensors",
        tokenizer=token_digests(model),
        files=file_digests(model.checkpoint),
        provenance=Provenance.of(model.checkpoint),
        stored={label: made.stored for label, made in by_label.items()},
    )


class _Made(NamedTuple):
    digest: Digest
    sketch: Sketch | None
    stored: Stored


Leaf = tuple[str, NamedTensor, np.ndarray | None]  # its values, unless it is read as it is stored


def _leaves(model: Model | TensorsOnly) -> Iterator[Leaf]:
    """Every tensor by its label; fused tensors are divided, experts taken apart."""
    tensors = unchecked_tensors(model)
    rows = [each for each in tensors if not is_buffer(each)]
    if problem := next(filter(None, (why_unread(each.tensor) for each in rows)), ""):
        raise CheckpointError(
            f"{problem}; an identity is of all values", file=model.checkpoint.name
        )
    leaves = {row.name: [*_divided(tensors, row)] for row in rows}
    labels = _labels(model, tensors, [leaf for parts in leaves.values() for leaf in parts])
    for batch in batches(rows, lambda each: each.tensor.nbytes):
        model.checkpoint.prefetch(each.name for each in batch)
        for row in batch:
            for leaf in leaves[row.name]:
                yield next(labels), leaf, None if leaf.undone == () else _array(leaf)


def is_buffer(tensor: NamedTensor) -> bool:
    """Detect what some versions save and others make: rotary frequencies, causal masks."""
    if NO_WEIGHTS.fullmatch(tensor.role):
        return True
    is_mask = len(tensor.shape) == 4 and tensor.shape[:2] == (1, 1) and MASK.search(tensor.name)
    return bool(is_mask) and not tensor.has_role


def _labels(
    model: Model | TensorsOnly, tensors: Tensors, leaves: list[NamedTensor]
) -> Iterator[str]:
    """A label for each tensor that no other has, whatever their order in the file."""
    names = [leaf.name.removeprefix(model.prefix) for leaf in leaves]
    labels = [
        tensors.label(leaf) if leaf.has_role else name
        for leaf, name in zip(leaves, names, strict=True)
    ]
    of_roles = {*OF_MODEL, *OF_WRAPPERS}
    holders = Counter(labels)
    for i, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        is_decoy = not leaf.has_role and name.removesuffix(".bias") in of_roles
        is_shared = is_decoy or holders[labels[i]] > 1
        if (is_shared or not leaf.has_role) and (" " in name or not name.isprintable()):
            problem = "has a space or a control character in its name, so that it has no label"
            raise CheckpointError(problem, file=model.checkpoint.name, tensor=leaf.name)
        if is_shared:
            labels[i] = f"{labels[i]} {name}"
    holders = Counter(labels)
    if twice := next((label for label in labels if holders[label] > 1), ""):
        problem = f"has several tensors for {printable(twice)}; an identity needs one for each"
        raise CheckpointError(problem, file=model.checkpoint.name)
    return iter(labels)


def _divided(tensors: Tensors, tensor: NamedTensor) -> Iterator[NamedTensor]:
    parts = tensor.experts or tensors.parts(tensor)
    if not parts:
        yield tensor
    for part in parts:
        yield from _divided(tensors, part)


def _array(leaf: NamedTensor) -> np.ndarray:
    """The values in one convention; gains that are stored as a distance from one as that."""
    values = leaf.array()
    for step in leaf.undone or ():
        if isinstance(step, tuple) and isinstance(step[0], float):
            values = values - np.float32(step[0])
    return values


def _made(leaf: Leaf) -> tuple[str, _Made]:
    label, tensor, values = leaf
    sketching = Sketching()
    if values is None:
        blocks: Iterable[np.ndarray] = map(_stored, blocks_of(tensor.tensor))
    else:
        blocks = [_narrow(values)]
    made = digest(map(sketching.add, blocks), tensor.shape)
    bits = _bits(tensor.tensor)
    shows = bits <= HALF or shows_rounding(_first(leaf))
    about = Stored(tensor.name, tensor.role, tensor.layer, tensor.expert, bits, shows)
    return label, _Made(made, sketching.finished(), about)


def _first(leaf: Leaf) -> np.ndarray:
    """Values that nearly always show if a tensor was rounded."""
    _, tensor, values = leaf
    if values is not None:
        return values.reshape(-1)[:TELLING]
    return Block(tensor.tensor, 0, min(TELLING, prod(tensor.shape))).values()


def _bits(tensor: Tensor) -> float:
    """Bits of a value, without scales that are stored apart."""
    codes = max((part.nbytes for part in tensor.parts), default=0)
    return 8 * codes / max(1, prod(tensor.shape))


def _stored(block: Block) -> np.ndarray:
    """The values of a block, bfloat16 as its bits."""
    tensor = block.tensor
    if isinstance(tensor, StoredTensor) and tensor.dtype == "BF16":
        return tensor.raw(2 * block.start, 2 * block.stop).view(BF16)
    return block.values()


def _narrow(values: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 where that holds all of the values, which are half to hash."""
    bits = np.ravel(values).view("<u4")
    return values if (bits & 0xFFFF).any() else (bits >> 16).astype("<u2").view(BF16)


def is_identity(source: object) -> bool:
    """True if a source names the file of an identity."""
    return isinstance(source, str | Path) and str(source).endswith(SUFFIX)


def read_identity(path: str | Path) -> Identity:
    """Read what `weightscope id --out` wrote. Whether it is authentic is not known."""
    path = Path(path)
    text = read_small(path, SIZE * MAX_BYTES)
    value = parse_json(text, file=path, times=SIZE)
    if {"dsseEnvelope", "payload", "predicate"} & value.keys():  # signed: a claim's modules read it
        from weightscope.pairs.claims.claim import opened_claim

        value = opened_claim(path, SIZE).statement.get("predicate", {})
    try:
        stored = Identity(
            _text(value["name"]),
            {label: _checked(entry) for label, entry in value["tensors"].items()},
            {label: _of_text(entry["sketch"]) for label, entry in value["tensors"].items()},
            Stated.of_json(value["settings"]),
            _text(value["container"]),
            _checked_tokens(_texts(value["tokenizer"])),
            _texts(value["files"]),
            Provenance().of_all([_record(path, text)]),
        )
        if not all(label.isprintable() for label in stored.tensors):
            raise ValueError("a label has a control character")
        if value["wsid"] != stored.wsid:
            raise ValueError(f"its tensors give {stored.wsid}, not {printable(value['wsid'])[:80]}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"is not an identity of version {VERSION} ({printable(error)[:200]})"
        advice = "`weightscope id SOURCE --out FILE.id.json` writes one"
        raise CheckpointError(f"{problem}; {advice}", file=path) from None
    return stored


def check_signed(path: Path, key: Path) -> None:
    """Refuse an identity that the owner of a public key did not sign."""
    from weightscope.pairs.claims.claim import opened_claim
    from weightscope.pairs.claims.verify import signatures

    envelope = opened_claim(path, SIZE).envelope
    if envelope is None or not signatures().is_signed_by(envelope, key):
        problem = "has no signature" if envelope is None else "is not signed"
        raise CheckpointError(f"{problem} by {printable(key)}; do not trust it", file=path)


def _record(path: Path, text: bytes) -> dict[str, Any]:
    file = {"name": printable(path.name), "size": len(text), "sha256": sha256(text).hexdigest()}
    return {"name": printable(path), "files": [file]}


def _checked(entry: Any) -> Digest:
    shape, exact = entry["shape"], entry["exact"].split()
    hashes = {kind: entry[kind] for kind in KINDS if kind in entry}
    axes = all(type(size) is int and 0 <= size < LARGEST_AXIS for size in shape)
    needed = {*exact, *ROUNDINGS}
    if not axes or len(shape) > MOST_AXES or not exact or not needed <= {*hashes}:
        raise ValueError("a tensor needs a shape, and a SHA-256 as bf16, f16 and its exact kind")
    if not all(HEX.fullmatch(each) for each in hashes.values()):
        raise ValueError("a SHA-256 has 64 hexadecimal digits")
    return Digest(tuple(shape), tuple(exact), hashes)


def _in_text(sketch: Sketch | None) -> str:
    return " ".join(map(str, (f"{sketch.norm:.6g}", *sketch.sums))) if sketch else ""


def _of_text(text: str) -> Sketch | None:
    norm, *sums = text.split() or [""]
    if not norm:
        return None
    sketch = Sketch(float(norm), tuple(map(int, sums)))
    is_small = all(abs(each) < LARGEST_SUM for each in sketch.sums)
    if len(sums) != SUMS or not (0 <= sketch.norm < LARGEST_NORM and is_small):
        raise ValueError(f"a sketch is a norm and {SUMS} sums")
    return sketch


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_KEY:
        raise TypeError(f"a text of at most {LONGEST_KEY:,} characters was expected")
    return value


def _checked_tokens(parts: dict[str, str]) -> dict[str, str]:
    if parts and not ("tokens" in parts and re.fullmatch("[0-9]{1,12}", parts["size"])):
        raise ValueError("a tokenizer has tokens and their number")
    return parts


def _texts(value: Any) -> dict[str, str]:
    return {name: _text(text) for name, text in value.items()}
