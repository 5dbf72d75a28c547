"""Verify a claim: compare file digests, recompute the lineage and compare each field."""

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib import import_module
from math import isclose, log
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted, printable, shortened
from weightscope.core.results import Result
from weightscope.core.tables import as_json
from weightscope.model.model import Model, open_model
from weightscope.pairs.claims.claim import (
    INDEXED,
    JUDGED,
    NOT_SHARED,
    SHARED,
    Claim,
    OpenedClaim,
    Options,
    claim_of,
    judgement,
    opened_claim,
    probes_of,
    tier_of,
)
from weightscope.pairs.claims.digests import (
    SERIALIZATION,
    digests_of,
    digests_of_print,
    model_digest,
)
from weightscope.pairs.lineage.lineage import Lineage, lineage
from weightscope.pairs.lineage.probes import PUBLIC, digest_of_heads, keyed_probes
from weightscope.pairs.lineage.sketches import is_fingerprint
from weightscope.pairs.lineage.verdict import candidates, judge

INSTALL = "pip install 'weightscope-attention[attest]'"
# tolerance of numbers of two runs, since other machines round in another order
RELATIVE = 0.01
ABSOLUTE = 1e-6
OF_LOGARITHM = 0.01  # tolerance of ln p, relative, and absolute below 1
LEAST = 1e-12  # a printed number that may be float32's rounding; less is a probability
NUMBER = r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])"
Base = Model | str | Path
BY_PRINTS: tuple[str, ...] = ("attention", "layers")  # fields that fingerprints hold enough for
FINITE = 1e300  # largest number in a claim
NAMED = 3  # differences in the first sentence
LISTED = 1_000  # differences in the record
FROM_A_PRINT = (
    "A base was a fingerprint: that it was made from the claimed files is its maker's word."
)


class Mismatch(NamedTuple):
    """A field whose value differs between a claim and its check."""

    field: str  # path in the claim
    claim: Any
    found: Any


@dataclass(frozen=True, eq=False, repr=False)
class Verification(Result):
    """The result of checking a claim.

    `holds`; `undecided`; `tier` "verified by weights" or "indexed" (a base was a fingerprint, whose
    word was taken); `signature` "valid", "not valid", "not checked" or "none"; `differences`, and
    `not_checked`, fields that nothing is known of.
    """

    claim: Claim
    tier: str | None  # None where nothing was computed
    signature: str
    differences: list[Mismatch] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    recomputed: str = ""  # the lineage's first sentence, of this run
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @property
    def holds(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    @property
    def undecided(self) -> bool:
        """True if nothing differs, but weights were not at hand for all that the claim says."""
        return self.holds and any(field in self.not_checked for field in JUDGED)

    @property
    def about(self) -> str:
        outcome = f"holds, {self.tier}" if self.holds else "does not hold"
        if self.undecided:
            outcome = f"undecided, {self.tier}"
        return f"{printable(self.claim.name)}: {outcome}"

    @property
    def lead(self) -> str:
        """The outcome in words: by what the claim holds, or where it does not."""
        if self.holds and not self.undecided:
            return f"The claim holds ({self.tier}): {self.recomputed}"
        if self.holds:
            bases = " or ".join(map(printable, self.claim.bases))
            shown = f"shares no heads with {bases}"
            if self.claim.predicate["attention"] == SHARED:
                shown = f"shares heads with {bases}, layer by layer as claimed"
            holds = f"Undecided: as far as fingerprints show, the claim holds ({self.tier})"
            return f"{holds}: {printable(self.claim.name)} {shown}."
        parts = [
            f"{each.field} is {_shown(each.claim)} in the claim and {_shown(each.found)} here"
            for each in self.differences[:NAMED]
        ]
        lead = f"The claim does not hold: {'; '.join(parts)}"
        if len(self.differences) > NAMED:
            lead += f"; {len(self.differences) - NAMED} more fields differ"
        version = self.claim.predicate["version"]
        if version != self.provenance.version:
            return f"{lead}. It was made by weightscope {_shown(version)}."
        return f"{lead}."

    def printed(self) -> list[str]:
        """The lines that the terminal shows."""
        lines = [self.lead, f"Signature: {self.signature}."]
        if self.holds and self.tier == INDEXED:
            lines.append(FROM_A_PRINT)
        if self.not_checked:
            lines.append(f"Not verified: {', '.join(self.not_checked)}.")
        files_of = {name: base.files for name, base in self.claim.bases.items()}
        for name, files in [(self.claim.name, self.claim.digests), *files_of.items()]:
            lines.append(f"SHA-256 {model_digest(files)}: {printable(name)}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """The record that `weightscope verify --json` prints."""
        record = {
            "holds": self.holds,
            "undecided": self.undecided,
            "tier": self.tier,
            "signature": self.signature,
            "verdict": str(self.claim.predicate["verdict"]),
            "suspect": self.claim.name,
            "bases": list(self.claim.bases),
            "claim_version": str(self.claim.predicate["version"]),
            "differences": [each._asdict() for each in self.differences[:LISTED]],
            "not_checked": self.not_checked,
        }
        return dict(as_json(self.provenance.envelope(self.lead) | record))


def read_claim(path: str | Path) -> tuple[Claim, OpenedClaim]:
    """A claim from a file, bare or signed, and the opened file.

    Raises
    ------
    CheckpointError
        It is damaged, too large, of another type or version, or lacks fields.
    """
    opened = opened_claim(Path(path))
    return claim_of(opened.statement, path), opened


def signatures() -> ModuleType:
    """The module that signs, which needs the extra `attest`."""
    try:
        return import_module("weightscope.pairs.claims.signing")
    except ImportError:
        raise CheckpointError(f"signatures need the extra attest: {INSTALL}") from None


def verify(
    path: str | Path,
    suspect: Base,
    bases: Sequence[Base],
    *,
    key: str | Path | None = None,
    options: Options | None = None,
    probe_key: str | Path | None = None,
) -> Verification:
    """Compute a claimed lineage again and compare.

    Parameters
    ----------
    path : str or Path
        The claim.
    suspect : Model, str or Path
        The checkpoint that it is about.
    bases : several of the same, or fingerprint files
        Its bases, in any order.
    key : str or Path, optional
        A public key in PEM that the claim must be signed by.
    options : Options, optional
        How the checkpoints were opened; by default with the claim's tower and no file of rows.
    probe_key : str or Path, optional
        The key file that fingerprints were made with.

    Raises
    ------
    CheckpointError
        The claim, a checkpoint or the key cannot be read, or a fingerprint does not record its
        heads' digest.
    """
    claim, opened = read_claim(path)
    signature = _signature(opened, key)
    if key is not None and signature != "valid":
        unsigned = Mismatch("signature", signature, "one by the given key")
        return Verification(claim, None, signature, [unsigned])
    if is_fingerprint(suspect):
        raise CheckpointError("is a fingerprint; the suspect's weights are needed", file=suspect)
    if len(bases) != len(claim.bases):
        names = ", ".join(map(_shown, claim.bases))
        problem = f"is about {counted(len(claim.bases), 'base')} ({names}); {len(bases)} given"
        raise CheckpointError(problem, file=path)
    model = _opened(suspect, claim)
    given = [base if is_fingerprint(base) else _opened(base, claim) for base in bases]
    if options is None:  # a file of rows is known by its digest alone, and none was given
        options = claim.options._replace(families=None)
    in_order, differences = _matched(claim, model, given)
    differences += _about(claim, options)
    if differences:
        return Verification(claim, None, signature, differences, list(JUDGED))
    named = {
        name: base if is_fingerprint(base) else called(base, name)
        for name, base in zip(claim.bases, in_order, strict=True)
    }
    renamed = called(model, claim.name)
    result = lineage(renamed, [*named.values()], probe_key=probe_key, nonce=claim.nonce)
    mixed = any(is_fingerprint(base) != claim.bases[name].is_print for name, base in named.items())
    differences, not_checked = _judged_otherwise(claim, result, mixed)
    if not differences and result.probes.nonce:
        differences += _drawn_anew(result, named.values(), probe_key)
    lead = printable(result.lead)
    return Verification(
        claim, tier_of(result), signature, differences, not_checked, lead, result.provenance
    )


def _opened(source: Base, claim: Claim) -> Model:
    """A model as given, or opened from a name with the claim's tower."""
    if isinstance(source, Model):
        return source
    return open_model(source, tower=claim.options.tower)


def _drawn_anew(
    result: Lineage, bases: Iterable[Base], probe_key: str | Path | None
) -> Iterator[Mismatch]:
    """Draw other probes: an issuer may try many nonces and keep one that suits."""
    assert result.suspect.source is not None
    key = keyed_probes(probe_key) if probe_key else PUBLIC
    pairs = candidates(result.suspect.source, list(bases), key).pairs
    is_shared = any(judge(suspect, base).match is not None for suspect, base in pairs)
    was_shared = result.origin is not None
    if is_shared != was_shared:
        before, anew = (SHARED, NOT_SHARED) if was_shared else (NOT_SHARED, SHARED)
        yield Mismatch("attention", before, f"{anew}, by probes drawn anew")


def _signature(opened: OpenedClaim, key: str | Path | None) -> str:
    """The state of a claim's signature."""
    if opened.envelope is None:
        return "none"
    if key is None:
        return "not checked"
    return "valid" if signatures().is_signed_by(opened.envelope, Path(key)) else "not valid"


def _judged_otherwise(
    claim: Claim, result: Lineage, mixed: bool
) -> tuple[list[Mismatch], list[str]]:
    """Differences between the claim and a second run, and the fields not compared.

    If `mixed`, there were weights in place of a fingerprint, or the reverse.
    """
    rerun = judgement(result)
    compared = BY_PRINTS if mixed else JUDGED
    if mixed:  # a fingerprint goes by its own name
        claimed = dict(zip((each.base.name for each in result.compared), claim.bases, strict=True))
        for layer in rerun["layers"]:
            layer["base"] = claimed.get(layer["base"], layer["base"])
    names = sorted(map(printable, {claim.name, *claim.bases}), key=len, reverse=True)
    differences = list(_differences("tier", claim.predicate["tier"], claim.tier, names))
    if not mixed:
        differences += _differences("probes", claim.predicate["probes"], probes_of(result), ())
        for i, each in enumerate(result.compared):
            place, claimed_heads = f"bases[{i}].heads", claim.predicate["bases"][i]["heads"]
            heads = {"sha256": each.base.about.get("heads_sha256", "")}
            differences += _differences(place, claimed_heads, heads, ())
    for key in compared:
        differences += _differences(key, claim.predicate[key], rerun[key], names, mixed)
    return differences, ["version", "date", *(key for key in JUDGED if key not in compared)]


def called(model: Model, name: str) -> Model:
    """A copy of a model under another name."""
    renamed = copy(model)
    renamed.called = name
    return renamed


def _about(claim: Claim, options: Options | None) -> Iterator[Mismatch]:
    """Find contradictions within a claim, and other options than the given ones."""
    models = {"suspect": (claim.predicate["suspect"], claim.digests)}
    for i, described in enumerate(claim.predicate["bases"]):
        models[f"bases[{i}]"] = described, claim.bases[described["name"]].files
    for where, (described, files) in models.items():
        digest = {"sha256": model_digest(files)}
        yield from _differences(f"{where}.digest", described.get("digest"), digest, ())
        known = {"name", "digest"}
        if where != "suspect":
            known |= {"files", "heads", "read_from"}
        for key in sorted(described.keys() - known):
            yield Mismatch(f"{where}.{shortened(key)}", described[key], None)
    yield from _differences("serialization", claim.predicate["serialization"], SERIALIZATION, ())
    if options is not None:
        yield from _differences("options", claim.options._asdict(), options._asdict(), ())


def _matched(
    claim: Claim, suspect: Model, given: Sequence[Base]
) -> tuple[list[Any], list[Mismatch]]:
    """The bases in the claim's order, and the files that differ from it."""
    differences = list(_other_files("subject", claim.digests, digests_of(suspect)))
    left, in_order = list(given), []
    for i, name in enumerate(claim.bases):
        digests = [_expected(claim, name, base) for base in left]
        fits = next((k for k, (want, have) in enumerate(digests) if want == have), None)
        if fits is None:
            fits = 0
            differences += _other_files(f"bases[{i}].files", *digests[0])
        in_order.append(left.pop(fits))
    return in_order, differences


def _expected(claim: Claim, name: str, base: Any) -> tuple[dict[str, str], dict[str, str]]:
    """A base's claimed digests and its actual ones: of files, or of heads for a fingerprint."""
    claimed = claim.bases[name]
    if not is_fingerprint(base):
        if not claimed.is_print:
            return claimed.files, digests_of(base)
        return {"heads": claimed.heads}, {"heads": digest_of_heads(base)}
    files, heads = digests_of_print(Path(base))
    if claimed.is_print:
        return claimed.files, files
    if not heads:
        problem = "records no digest of its heads; make it again with `weightscope fingerprint`"
        raise CheckpointError(problem, file=base)
    return {"heads": claimed.heads}, {"heads": heads}


def _other_files(
    where: str, claimed: dict[str, str], computed: dict[str, str]
) -> Iterator[Mismatch]:
    """Files that are missing, more, or of another content."""
    for name in sorted(claimed.keys() | computed.keys()):
        if claimed.get(name) != computed.get(name):
            yield Mismatch(f"{where}[{shortened(name)}]", claimed.get(name), computed.get(name))


def _differences(
    where: str, claim: Any, computed: Any, names: Sequence[str], loose: bool = False
) -> Iterator[Mismatch]:
    """Compare two JSON values by path: numbers within tolerance, numbers in texts by last digit."""
    if isinstance(claim, dict) and isinstance(computed, dict):
        for key in sorted(claim.keys() | computed.keys()):
            place, mine, theirs = f"{where}.{shortened(key)}", claim.get(key), computed.get(key)
            if mine is theirs is None and not claim.keys() & computed.keys() & {key}:
                shown = ["null" if key in each else "no such key" for each in (claim, computed)]
                yield Mismatch(place, *shown)
            elif not (loose and key in ("likeness", "z")):
                yield from _differences(place, mine, theirs, names, loose)
    elif isinstance(claim, list) and isinstance(computed, list) and len(claim) == len(computed):
        for i, (mine, theirs) in enumerate(zip(claim, computed, strict=True)):
            yield from _differences(f"{where}[{i}]", mine, theirs, names, loose)
    elif not _agree(where, claim, computed, names):
        yield Mismatch(where, claim, computed)


def _agree(where: str, claim: Any, computed: Any, names: Sequence[str]) -> bool:
    """True if two values are equal up to rounding on another machine."""
    if isinstance(claim, str) and isinstance(computed, str):
        return claim == computed or _same_text(claim, computed, names)
    if isinstance(claim, bool) or isinstance(computed, bool) or not isinstance(claim, int | float):
        return type(claim) is type(computed) and claim == computed
    if not isinstance(computed, int | float) or isinstance(computed, int):
        return claim == computed  # whole numbers count something
    if where == "p_value" and claim != computed:
        if not (0 < claim <= 1 and computed > 0):
            return False
        return isclose(log(claim), log(computed), rel_tol=OF_LOGARITHM, abs_tol=OF_LOGARITHM)
    return abs(claim) < FINITE and isclose(claim, computed, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _same_text(claim: str, computed: str, names: Sequence[str]) -> bool:
    """True if texts differ at most in last digits of numbers, but not in names or integers."""
    exact = [re.escape(name) for name in names]
    # a name first, so that its digits are no number
    token = re.compile(f"({'|'.join([*exact, NUMBER])})")
    mine, theirs = token.split(claim), token.split(computed)
    if mine[::2] != theirs[::2]:  # the words between
        return False
    tokens = zip(mine[1::2], theirs[1::2], strict=True)
    return all(x == y or (not {x, y} & {*names} and _last_digit(x, y)) for x, y in tokens)


def _last_digit(x: str, y: str) -> bool:
    """True if two printed numbers differ by at most one in the last digit; integers, not at all."""
    if x == y or "0" in (x, y) or not ("." in x + y or "e" in x + y):
        return x == y
    numbers = [text.replace(",", "").partition("e") for text in (x, y)]
    steps = []
    for mantissa, _, exponent in numbers:
        decimals = len(mantissa.partition(".")[2])
        steps.append(10.0 ** (int(exponent or 0) - decimals))
    values = [float("".join(parts)) for parts in numbers]
    of_rounding = all(LEAST < abs(value) < ABSOLUTE for value in values)
    return of_rounding or isclose(*values, rel_tol=0, abs_tol=1.01 * min(steps))


def _shown(value: object) -> str:
    """A value in a sentence."""
    text = printable(value)
    if len(text) > 80:
        return f"'{text[:60]} ...'"
    return f"'{text}'" if isinstance(value, str) else text
