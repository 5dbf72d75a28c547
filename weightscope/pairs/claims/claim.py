"""A lineage as an in-toto statement: digests of its files, and every number to recompute."""

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from weightscope.checkpoint.config import MAX_BYTES, parse_json, read_small
from weightscope.checkpoint.storage import SHA256
from weightscope.core.errors import CheckpointError, one_line, printable
from weightscope.pairs.claims.digests import SERIALIZATION, digests_of, model_digest, resources
from weightscope.pairs.lineage.lineage import Lineage
from weightscope.pairs.lineage.sketches import LONGEST_TEXT, Sketches

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://weightscope/lineage/v1"  # type of claims of this version
BY_WEIGHTS, INDEXED = "verified by weights", "indexed"  # tiers: how the bases were judged
WEIGHTS, PRINT = "weights", "fingerprint"  # source of what is known of a base
SHARED, NOT_SHARED = "shared", "not shared"  # attention heads
ABOUT_FILES = ("suspect", "bases", "options", "probes", "serialization")  # keys besides `JUDGED`
LAYER = ("layer", "base", "base_layer", "likeness", "z")  # columns of the layer map
MOST_BASES = 64  # bases of a claim
MOST_FILES = 1_100  # files of a model; an index may name 1,000
PAYLOAD = "application/vnd.in-toto+json"
MOST_SIGNATURES = 16


class Options(NamedTuple):
    """Options that the checkpoints of a lineage were opened with."""

    tower: str | None = None
    families: str | None = None  # SHA-256 of the file of rows


AS_IS = Options()


def statement(lineage: Lineage, options: Options = AS_IS) -> dict[str, Any]:
    """A lineage as a statement of in-toto, unsigned; its files are read for their digests.

    Raises
    ------
    CheckpointError
        The suspect is a fingerprint, a base is one of a folder of fingerprints, or a file cannot be
        read.
    """
    suspect = lineage.suspect
    if suspect.source is None:
        needed = "a claim is about the files of a checkpoint, so the suspect's weights are needed"
        raise CheckpointError(f"is a fingerprint; {needed}", file=suspect.name)
    digests = digests_of(suspect.source)
    about = {
        "suspect": {"name": suspect.name, "digest": {"sha256": model_digest(digests)}},
        "bases": [_described(compared.base) for compared in lineage.compared],
        "options": options._asdict(),
        "probes": probes_of(lineage),
        "serialization": SERIALIZATION,
    }
    return {
        "_type": STATEMENT,
        "subject": resources(digests),
        "predicateType": PREDICATE,
        "predicate": {
            "version": lineage.provenance.version,
            "date": lineage.provenance.date,
            "tier": tier_of(lineage),
            **about,
            **judgement(lineage),
        },
    }


def _described(base: Sketches) -> dict[str, Any]:
    """A base by name and digests: of its files, or of its fingerprint's, and of its heads."""
    if base.source is not None:
        digests, read_from = digests_of(base.source), WEIGHTS
    else:
        files = base.read["files"]
        digests, read_from = {PurePath(file["name"]).name: file["sha256"] for file in files}, PRINT
    return {
        "name": base.name,
        "digest": {"sha256": model_digest(digests)},
        "files": resources(digests),
        "heads": {"sha256": base.about.get("heads_sha256", "")},
        "read_from": read_from,
    }


def probes_of(lineage: Lineage) -> dict[str, str] | None:
    """The seed of the probes and its nonce; None if they are public or a key's."""
    if not lineage.probes.nonce:
        return None
    return {"seed": lineage.probes.seed, "nonce": lineage.probes.nonce}


def tier_of(lineage: Lineage) -> str:
    """The tier of a claim: by the weights of every base, or by a fingerprint."""
    by_weights = all(each.base.source is not None for each in lineage.compared)
    return BY_WEIGHTS if by_weights else INDEXED


def judgement(lineage: Lineage) -> dict[str, Any]:
    """The values of a lineage that a second run must reproduce."""
    record, proof = lineage.as_json(), lineage.proof
    layers = []
    for row in record["alignment"]:
        layer = {key: row[key] for key in LAYER}
        if layer["base_layer"] is not None:
            layer["base_layer"] = int(layer["base_layer"])
        layers.append(layer)
    shown = {
        "lead": printable(lineage.lead),
        "layers": layers,
        "parts": record.get("parts", {}),
        "attention": SHARED if lineage.origin is not None else NOT_SHARED,
        "direction": {
            "first": lineage.came_first,
            "shown_by": None if proof is None else proof.how,
        },
    }
    return {key: shown.get(key, record.get(key)) for key in JUDGED}


JUDGED = (  # the keys of `judgement`
    *("lead", "verdict", "base", "direction", "parts", "attention", "p_value", "comparisons"),
    *("layers", "kinds", "weights", "doubts"),
)
STATED = {"_type", "subject", "predicateType", "predicate"}
FIELDS = {"version", "date", "tier", *ABOUT_FILES, *JUDGED}


class ClaimedBase(NamedTuple):
    """A base's files, as claimed."""

    files: dict[str, str]  # digests by name
    heads: str  # digest of the tensors that sketches depend on
    is_print: bool


class Claim(NamedTuple):
    """The parts of a claim that are needed before anything is recomputed."""

    predicate: dict[str, Any]
    name: str  # the suspect's
    digests: dict[str, str]  # digests of the suspect's files, by name
    bases: dict[str, "ClaimedBase"]  # bases by name
    options: Options
    nonce: str | None  # nonce of the probes

    @property
    def tier(self) -> str:
        """The tier that follows from the bases: by weights, or by a fingerprint."""
        by_prints = any(base.is_print for base in self.bases.values())
        return INDEXED if by_prints else BY_WEIGHTS


def claim_of(value: Mapping[str, Any], file: object) -> Claim:
    """Check a statement's type, version and fields, and return it as a claim."""

    def refuse(problem: str) -> CheckpointError:
        return CheckpointError(f"is not a claim that can be verified: {problem}", file=file)

    if value.get("_type") != STATEMENT:
        raise refuse(f"_type is {_shown(value.get('_type'))}; {STATEMENT} was expected")
    if value.get("predicateType") != PREDICATE:
        shown = _shown(value.get("predicateType"))
        raise refuse(f"predicateType is {shown}; this version reads {PREDICATE}")
    predicate = value.get("predicate")
    if not isinstance(predicate, dict):
        raise refuse("it has no predicate")
    if missing := sorted(FIELDS - predicate.keys()):
        raise refuse(f"it lacks {', '.join(missing)}")
    if unknown := sorted((predicate.keys() - FIELDS) | (value.keys() - STATED)):
        raise refuse(f"it holds what nothing is known of: {', '.join(map(_shown, unknown[:4]))}")
    try:
        listed = _listed(predicate["bases"], "bases", MOST_BASES)
        bases = [(_name(base), _base(base)) for base in listed]
        claim = Claim(
            predicate,
            name=_name(predicate["suspect"]),
            digests=_files(value.get("subject"), "subject"),
            bases=dict(bases),
            options=_options(predicate["options"]),
            nonce=_nonce(predicate["probes"]),
        )
    except ValueError as error:
        raise refuse(str(error)) from None
    if len(claim.bases) != len(bases):
        raise refuse("two bases have one name")
    return claim


def _shown(value: object) -> str:
    return f"'{printable(value)[:80]}'"


def _listed(value: Any, what: str, most: int) -> list[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= most:
        raise ValueError(f"{what} should be a list of 1 to {most:,} entries")
    return value


def _name(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_TEXT:
        raise ValueError(f"a name should be a text of 1 to {LONGEST_TEXT} characters")
    return name


def _files(value: Any, what: str) -> dict[str, str]:
    """Digests by the names of files."""
    files = {}
    for entry in _listed(value, what, MOST_FILES):
        name, digest = _name(entry), entry.get("digest")
        sha256 = digest.get("sha256") if isinstance(digest, dict) else None
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            digits = f"a SHA-256 of {_shown(name)}, as 64 hexadecimal digits"
            raise ValueError(f"{what} should have {digits}")
        if name in files:
            raise ValueError(f"{what} has {_shown(name)} twice")
        files[name] = sha256
    return files


def _base(value: Any) -> ClaimedBase:
    read_from, heads = value.get("read_from"), value.get("heads")
    if read_from not in (WEIGHTS, PRINT) or not isinstance(heads, dict):
        sources = f"be read_from {WEIGHTS} or {PRINT}"
        raise ValueError(f"a base should have the digest of its heads, and {sources}")
    files = _files(value.get("files"), "files")
    return ClaimedBase(files, str(heads.get("sha256")), read_from == PRINT)


def _nonce(value: Any) -> str | None:
    """The nonce of the probes; None where they are public or a key's."""
    if value is None:
        return None
    is_pair = isinstance(value, dict) and value.keys() == {"seed", "nonce"}
    texts = value.values() if is_pair else [None]
    if not all(isinstance(text, str) and 0 < len(text) <= LONGEST_TEXT for text in texts):
        pair = f"a seed and a nonce of 1 to {LONGEST_TEXT} characters"
        raise ValueError(f"probes should be null, or {pair}")
    return str(value["nonce"])


def _options(value: Any) -> Options:
    if not isinstance(value, dict) or value.keys() != {*Options._fields}:
        raise ValueError(f"options should be {', '.join(Options._fields)}")
    if any(not isinstance(option, str | None) for option in value.values()):
        raise ValueError("each of the options should be a text or null")
    if "" in value.values():
        raise ValueError("each of the options should be a name, or null where it was not given")
    return Options(**value)


# Files of claims: a statement, bare, in a DSSE envelope, or in a Sigstore bundle


class OpenedClaim(NamedTuple):
    """A statement and its envelope; None if it is not signed."""

    statement: dict[str, Any]
    envelope: dict[str, Any] | None = None


def opened_claim(path: Path, times: int = 1) -> OpenedClaim:
    """The statement in a file, of so many times the usual size. No signature is checked."""
    value = parse_json(read_small(path, times * MAX_BYTES), file=path, times=times)
    if "dsseEnvelope" in value:
        bundled = value["dsseEnvelope"]
        value = bundled if isinstance(bundled, dict) else {"payload": ""}
    if "payload" not in value:
        return OpenedClaim(value)
    signatures = value.get("signatures")
    try:
        if value.get("payloadType") != PAYLOAD:
            shown = _shown(value.get("payloadType"))
            raise ValueError(f"payloadType is {shown}; {PAYLOAD} was expected")
        if not isinstance(signatures, list) or not 0 < len(signatures) <= MOST_SIGNATURES:
            raise ValueError(f"1 to {MOST_SIGNATURES} signatures were expected")
        for signature in signatures:
            b64decode(signature["sig"], validate=True)
        payload = b64decode(value["payload"], validate=True)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"is a damaged envelope ({one_line(error)})", file=path) from None
    return OpenedClaim(parse_json(payload, file=path, what="its payload ", times=times), value)
