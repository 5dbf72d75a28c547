"""A lineage as an in-toto statement: which files it is about, by digest, and every number that can be recomputed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from weightscope.checkpoint.storage import SHA256
from weightscope.claims.digests import SERIALIZATION, digests_of, model_digest, resources
from weightscope.errors import CheckpointError, printable
from weightscope.lineage.lineage import Lineage
from weightscope.lineage.sketches import LONGEST_TEXT, MOST_FILES, Sketches
from weightscope.tables import as_json

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://weightscope/lineage/v1"  # what a claim of this version is
BY_WEIGHTS, INDEXED = "verified by weights", "indexed"  # tiers: what the bases were judged by
SHARED = "shared"  # attention heads
ABOUT_FILES = ("suspect", "bases", "options", "probes", "serialization")  # what a claim is about, and how it was made
LAYER = ("layer", "base", "base_layer", "likeness", "z")  # columns of the layer map
MOST_BASES = 64  # of a claim


class Options(NamedTuple):
    """How the checkpoints of a lineage were opened."""

    tower: str | None = None
    families: str | None = None  # SHA-256 of the file of rows


AS_IS = Options()


def statement(lineage: Lineage, options: Options = AS_IS) -> dict[str, Any]:
    """A lineage as a statement of in-toto, unsigned; its files are read for their digests.

    Raises
    ------
    CheckpointError
        The suspect is a fingerprint, a base is one of a folder of fingerprints, or a file cannot be read.
    """
    suspect = lineage.suspect
    if suspect.source is None:
        problem = "is a fingerprint; a claim is about the files of a checkpoint, so the suspect's weights are needed"
        raise CheckpointError(problem, file=suspect.name)
    digests = digests_of(suspect)
    about = {
        "suspect": {"name": suspect.name, "digest": {"sha256": model_digest(digests)}},
        "bases": [_described(compared.base) for compared in lineage.compared],
        "options": options._asdict(), "probes": probes_of(lineage), "serialization": SERIALIZATION,
    }  # fmt: skip
    return {
        "_type": STATEMENT, "subject": resources(digests), "predicateType": PREDICATE,
        "predicate": {
            "version": lineage.provenance.version, "date": lineage.provenance.date, "tier": tier_of(lineage),
            **about, **judgement(lineage),
        },
    }  # fmt: skip


def probes_of(lineage: Lineage) -> dict[str, str] | None:
    """The seed of the random probes, and the nonce that it follows from with the digests; None for public probes."""
    return {"seed": lineage.probes.seed, "nonce": lineage.probes.nonce} if lineage.probes.nonce else None


def _described(base: Sketches) -> dict[str, Any]:
    """A base by name and digests; of a fingerprint, its own and those that it names."""
    digests = digests_of(base)
    about = {"name": base.name, "digest": {"sha256": model_digest(digests)}, "files": resources(digests)}
    return about if base.source is not None else about | {"made_of": resources(made_of(base))}


def made_of(base: Sketches) -> dict[str, str]:
    """Digests of the files that a fingerprint says it was made of; none if it does not know them all."""
    files = base.about.get("made_of", [])
    return {file["name"]: file["sha256"] for file in files} if all("sha256" in file for file in files) else {}


def tier_of(lineage: Lineage) -> str:
    """Whether a lineage was read from the weights of every base."""
    return BY_WEIGHTS if all(each.base.source is not None for each in lineage.compared) else INDEXED


def judgement(lineage: Lineage) -> dict[str, Any]:
    """What a lineage says, in values that a second run can be compared with."""
    proof = lineage.proof
    first = None if proof is None else "base" if lineage.verdict == "derived" else "suspect"
    layers = [{key: row[key] for key in LAYER} for row in lineage.alignment.records()]
    for layer in layers:
        layer["base_layer"] = None if layer["base_layer"] is None else int(layer["base_layer"])
    return dict(as_json({
        "lead": printable(lineage.lead), "verdict": lineage.verdict, "base": lineage.base,
        "direction": {"first": first, "shown_by": None if proof is None else proof.how},
        "attention": SHARED if lineage.origin is not None else "not shared",
        "p_value": lineage.p_value, "comparisons": lineage.comparisons, "layers": layers,
        "kinds": [vars(kind) for kind in lineage.kinds], "weights": lineage.weights, "doubts": lineage.doubts,
    }))  # fmt: skip


JUDGED = (  # the keys of `judgement`
    "lead", "verdict", "base", "direction", "attention", "p_value", "comparisons", "layers", "kinds", "weights",
    "doubts",
)  # fmt: skip
STATED = {"_type", "subject", "predicateType", "predicate"}
FIELDS = {"version", "date", "tier", *ABOUT_FILES, *JUDGED}


class Claim(NamedTuple):
    """What a claim says, as far as it must be known before anything is recomputed."""

    predicate: dict[str, Any]
    name: str  # the suspect's
    digests: dict[str, str]  # of the suspect's files
    bases: dict[str, dict[str, str]]  # digests of each base's files, by the base's name
    made_of: dict[str, dict[str, str]]  # for bases that were fingerprints: of the files that they name
    options: Options

    @property
    def tier(self) -> str:
        """What its bases were judged by."""
        return INDEXED if self.made_of else BY_WEIGHTS


def claim_of(value: Mapping[str, Any], file: object) -> Claim:
    """A statement as a claim; refused where it is of another type or version, or lacks what a claim needs."""

    def refuse(problem: str) -> CheckpointError:
        return CheckpointError(f"is not a claim that can be verified: {problem}", file=file)

    if value.get("_type") != STATEMENT:
        raise refuse(f"_type is {_shown(value.get('_type'))}; {STATEMENT} was expected")
    if value.get("predicateType") != PREDICATE:
        raise refuse(f"predicateType is {_shown(value.get('predicateType'))}; this version reads {PREDICATE}")
    predicate = value.get("predicate")
    if not isinstance(predicate, dict):
        raise refuse("it has no predicate")
    if missing := sorted(FIELDS - predicate.keys()):
        raise refuse(f"it lacks {', '.join(missing)}")
    if unknown := sorted(
        (predicate.keys() - FIELDS) | (value.keys() - {"_type", "subject", "predicateType", "predicate"})
    ):
        raise refuse(f"it holds what nothing is known of: {', '.join(map(_shown, unknown[:4]))}")
    try:
        _probes(predicate["probes"])
        name, bases = _name(predicate["suspect"]), list(map(_base, _listed(predicate["bases"], "bases", MOST_BASES)))
        claim = Claim(
            predicate, name, _files(value.get("subject"), "subject"), {name: files for name, files, _ in bases},
            {name: named for name, _, named in bases if named is not None}, _options(predicate["options"]),
        )  # fmt: skip
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
            raise ValueError(f"{what} should have a SHA-256 of {_shown(name)}, as 64 hexadecimal digits")
        if name in files:
            raise ValueError(f"{what} has {_shown(name)} twice")
        files[name] = sha256
    return files


def _base(value: Any) -> tuple[str, dict[str, str], dict[str, str] | None]:
    """A base's name, its files, and, of a fingerprint, the files that it names."""
    name = _name(value)
    named = _files(value["made_of"], "made_of") if value.get("made_of") else {} if "made_of" in value else None
    return name, _files(value.get("files"), "files"), named


def _probes(value: Any) -> None:
    if value is not None and not (
        isinstance(value, dict) and value.keys() == {"seed", "nonce"}
        and all(isinstance(text, str) and 0 < len(text) <= LONGEST_TEXT for text in value.values())
    ):  # fmt: skip
        raise ValueError("probes should be null, or a seed and a nonce")


def _options(value: Any) -> Options:
    if not isinstance(value, dict) or value.keys() != {*Options._fields}:
        raise ValueError(f"options should be {', '.join(Options._fields)}")
    if any(not isinstance(option, str | None) for option in value.values()):
        raise ValueError("each of the options should be a text or null")
    return Options(**value)
