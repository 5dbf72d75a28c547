"""Whether a claim holds: its files are compared by digest, its lineage is computed again, and each field compared."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import isclose, log
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from weightscope.claims.claim import (
    BY_WEIGHTS,
    INDEXED,
    JUDGED,
    SHARED,
    Claim,
    Options,
    claim_of,
    judgement,
    made_of,
    probes_of,
)
from weightscope.claims.digests import SERIALIZATION, digests_of, model_digest
from weightscope.claims.envelope import Opened, opened_claim
from weightscope.errors import CheckpointError, counted, printable
from weightscope.lineage.lineage import lineage
from weightscope.lineage.sketches import Sketches
from weightscope.lineage.verdict import Base, print_of
from weightscope.provenance import Provenance, source_of
from weightscope.results import Result
from weightscope.tables import as_json

INSTALL = "pip install 'weightscope-attention[attest]'"
RELATIVE, ABSOLUTE = 0.01, 1e-6  # two runs agree on a number up to this; other machines round in another order
LEAST = 1e-12  # of a printed number that float32's rounding may be; less is a probability
OF_LOGARITHM = 0.01  # the same of ln p, relative, and absolute below 1
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
BY_PRINTS = ("attention", "base", "layers")  # fields that fingerprints hold enough for
LARGEST = 1e300  # of a number in a claim
NAMED, LISTED = 3, 1_000  # differences in the first sentence, and in all


class Difference(NamedTuple):
    """A field that a claim and its check do not agree on."""

    field: str  # where in the claim
    claim: Any
    found: Any


@dataclass(frozen=True, eq=False, repr=False)
class Verification(Result):
    """Whether a claim holds.

    `holds`; `tier` "verified by weights" or "indexed" (a base was a fingerprint, whose word was taken); `signature`
    "valid", "not valid", "not checked" or "none"; `differences`, and `not_checked`, fields that nothing is known of.
    """

    claim: Claim
    tier: str | None  # None where nothing was computed
    signature: str
    differences: list[Difference] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def about(self) -> str:
        return f"{printable(self.claim.name)}: {f'holds, {self.tier}' if self.holds else 'does not hold'}"

    @property
    def lead(self) -> str:
        """Whether the claim holds, by what, and where it does not."""
        if self.holds and "lead" not in self.not_checked:
            return f"The claim holds ({self.tier}): {printable(self.claim.predicate['lead'])}"
        if self.holds:
            shares = "heads, layer by layer as claimed" if self.claim.predicate["attention"] == SHARED else "no heads"
            with_base = " or ".join(map(printable, self.claim.bases))
            shown = f"{printable(self.claim.name)} shares {shares}, with {with_base}"
            return f"As far as fingerprints show, the claim holds ({self.tier}): {shown}."
        parts = [f"{each.field} is {_shown(each.claim)} in the claim and {_shown(each.found)} here"
                 for each in self.differences[:NAMED]]  # fmt: skip
        more = f"; {len(self.differences) - NAMED} more fields differ" if len(self.differences) > NAMED else ""
        version = self.claim.predicate["version"]
        by = f" It was made by weightscope {_shown(version)}." if version != self.provenance.version else ""
        return f"The claim does not hold: {'; '.join(parts)}{more}.{by}"

    def printed(self) -> list[str]:
        """What the terminal shows."""
        lines = [self.lead, f"Signature: {self.signature}."]
        if self.holds and self.tier == INDEXED:
            lines.append("A base was a fingerprint: that it was made from the claimed files is its maker's word.")
        if self.not_checked:
            lines.append(f"Not checked: {', '.join(self.not_checked)}.")
        lines += [f"{printable(name)}: {model_digest(files)}" for name, files in self._models().items()]
        return lines

    def _models(self) -> dict[str, dict[str, str]]:
        return {self.claim.name: self.claim.digests, **self.claim.bases}

    def as_json(self) -> dict[str, Any]:
        """What `weightscope verify --json` prints."""
        return dict(as_json(self.provenance.envelope(self.lead) | {
            "holds": self.holds, "tier": self.tier, "signature": self.signature,
            "verdict": str(self.claim.predicate["verdict"]), "suspect": self.claim.name,
            "bases": list(self.claim.bases), "claim_version": str(self.claim.predicate["version"]),
            "differences": [each._asdict() for each in self.differences[:LISTED]], "not_checked": self.not_checked,
        }))  # fmt: skip


def read_claim(path: str | Path) -> tuple[Claim, Opened]:
    """A claim from a file, bare or signed, and what it was in.

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
        return import_module("weightscope.claims.signing")
    except ImportError:
        raise CheckpointError(f"signatures need the extra attest: {INSTALL}") from None


def verify(
    path: str | Path, suspect: Base, bases: Sequence[Base], *, key: str | Path | None = None,
    options: Options | None = None,
) -> Verification:  # fmt: skip
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
        How the checkpoints were opened; as the claim says by default.

    Raises
    ------
    CheckpointError
        The claim, a checkpoint or the key cannot be read, or a fingerprint does not say what it was made of.
    """
    claim, opened = read_claim(path)
    signature = "none" if opened.envelope is None else "not checked"
    if key is not None:
        valid = opened.envelope is not None and signatures().is_signed_by(opened.envelope, Path(key))
        signature = "valid" if valid else "not valid" if opened.envelope is not None else "none"
        if not valid:
            return Verification(claim, None, signature, [Difference("signature", signature, "one by the given key")])
    mine = print_of(suspect)
    if mine.source is None:
        raise CheckpointError("is a fingerprint; the suspect's weights are needed", file=mine.name)
    given = [print_of(base) for base in bases]
    if len(given) != len(claim.bases):
        names = ", ".join(map(_shown, claim.bases))
        problem = f"is about {counted(len(claim.bases), 'base')} ({names}); {len(given)} given"
        raise CheckpointError(problem, file=path)
    tier = BY_WEIGHTS if all(base.source is not None for base in given) else INDEXED
    in_order, differences = _matched(claim, mine, given)
    differences += _about(claim, options)
    read = [each.read if each.source is None else source_of(each.source.checkpoint) for each in (mine, *given)]
    provenance = Provenance().of_all(read)
    if differences:
        return Verification(claim, None, signature, differences, list(JUDGED), provenance)
    named = [base.called(name) for base, name in zip(in_order, claim.bases, strict=True)]
    probes = claim.predicate["probes"]
    again = lineage(mine.called(claim.name), named, nonce=probes["nonce"] if probes else None)
    found = judgement(again)
    prints = {base.name for base in named if base.source is None}
    mixed = prints != {*claim.made_of}  # weights in place of a fingerprint, or the reverse
    compared = BY_PRINTS if mixed else JUDGED
    if not mixed:
        differences += _differences("probes", probes, probes_of(again), ())
    own_names = sorted(map(printable, {claim.name, *claim.bases}), key=len, reverse=True)
    for name in compared:
        differences += _differences(name, claim.predicate[name], found[name], own_names, mixed)
    if claim.predicate["tier"] != claim.tier:
        differences.append(Difference("tier", claim.predicate["tier"], claim.tier))
    not_checked = ["version", "date", *(name for name in JUDGED if name not in compared)]
    return Verification(claim, tier, signature, differences, not_checked, provenance)


def _about(claim: Claim, options: Options | None) -> Iterator[Difference]:
    """Where a claim contradicts itself, or was made with other options."""
    models = {"suspect": (claim.predicate["suspect"], claim.digests)}
    for i, described in enumerate(claim.predicate["bases"]):
        models[f"bases[{i}]"] = described, claim.bases[described["name"]]
    for where, (described, files) in models.items():
        yield from _differences(f"{where}.digest", described.get("digest"), {"sha256": model_digest(files)}, ())
        known = {"name", "digest"} | ({"files", "made_of"} if where != "suspect" else set())
        for key in sorted(described.keys() - known):
            yield Difference(f"{where}.{key}", described[key], None)
    yield from _differences("serialization", claim.predicate["serialization"], SERIALIZATION, ())
    if options is not None:
        yield from _differences("options", claim.options._asdict(), options._asdict(), ())


def _matched(claim: Claim, suspect: Sketches, given: Sequence[Sketches]) -> tuple[list[Sketches], list[Difference]]:
    """The bases in the claim's order, and which files are others than the claim says."""
    differences = list(_other_files("subject", claim.digests, digests_of(suspect)))
    left, in_order = list(given), []
    for i, name in enumerate(claim.bases):
        wanted = [_expected(claim, name, base) for base in left]
        found = next((base for base, (want, have) in zip(left, wanted, strict=True) if want == have), None)
        if found is None:
            found, (want, have) = left[0], wanted[0]
            differences += _other_files(f"bases[{i}].files", want, have)
        left.remove(found)
        in_order.append(found)
    return in_order, differences


def _expected(claim: Claim, name: str, base: Sketches) -> tuple[dict[str, str], dict[str, str]]:
    """The digests that a claim wants of a base, and those of its files, or of the files that a fingerprint names."""
    claimed, is_print = claim.bases[name], name in claim.made_of
    if base.source is not None:
        return (claim.made_of[name] if is_print else claimed), digests_of(base)
    if is_print:
        return claimed, digests_of(base)
    if not (named := made_of(base)):
        problem = (
            "does not hold the digests of the files it was made of; make it with `weightscope fingerprint --digest`"
        )
        raise CheckpointError(problem, file=base.read["name"])
    return claimed, named


def _other_files(where: str, claimed: dict[str, str], found: dict[str, str]) -> Iterator[Difference]:
    """Files that are missing, more, or of another content."""
    for name in sorted(claimed.keys() | found.keys()):
        if claimed.get(name) != found.get(name):
            yield Difference(f"{where}[{printable(name)}]", claimed.get(name), found.get(name))


def _differences(where: str, claim: Any, found: Any, names: Sequence[str], loose: bool = False) -> Iterator[Difference]:
    """Where two values of JSON differ, by path: numbers within tolerance, texts but for their numbers' last digits."""
    if isinstance(claim, dict) and isinstance(found, dict):
        for key in sorted(claim.keys() | found.keys()):
            if not (loose and key in ("likeness", "z")):
                yield from _differences(f"{where}.{printable(key)}", claim.get(key), found.get(key), names, loose)
    elif isinstance(claim, list) and isinstance(found, list) and len(claim) == len(found):
        for i, (mine, other) in enumerate(zip(claim, found, strict=True)):
            yield from _differences(f"{where}[{i}]", mine, other, names, loose)
    elif not _agree(where, claim, found, names):
        yield Difference(where, claim, found)


def _agree(where: str, claim: Any, found: Any, names: Sequence[str]) -> bool:
    """Whether two values are the same up to what another machine may round otherwise."""
    if isinstance(claim, str) and isinstance(found, str):
        return claim == found or _same_text(claim, found, names)
    if isinstance(claim, bool) or isinstance(found, bool) or not isinstance(claim, int | float):
        return type(claim) is type(found) and claim == found
    if not isinstance(found, int | float) or isinstance(found, int):
        return claim == found  # whole numbers count something
    if where == "p_value" and found > 0 and 0 < claim <= 1:
        return isclose(log(claim), log(found), rel_tol=OF_LOGARITHM, abs_tol=OF_LOGARITHM)
    return abs(claim) < LARGEST and isclose(claim, found, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _same_text(claim: str, found: str, names: Sequence[str]) -> bool:
    """Whether texts are the same but for the last digit of numbers; names, and whole numbers, are compared exactly."""
    for name in names:
        claim, found = (text.replace(name, "\0") for text in (claim, found))
    if NUMBER.sub("#", claim) != NUMBER.sub("#", found):
        return False
    return all(_last_digit(x, y) for x, y in zip(NUMBER.findall(claim), NUMBER.findall(found), strict=True))


def _last_digit(x: str, y: str) -> bool:
    """Whether two printed numbers differ by at most one in the last digit; whole numbers must be the same."""
    if x == y or not ("." in x + y or "e" in x + y):
        return x == y
    numbers = [(text.replace(",", "").partition("e")) for text in (x, y)]
    steps = [10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) for mantissa, _, exponent in numbers]
    values = [float("".join(parts)) for parts in numbers]
    of_rounding = all(LEAST < abs(value) < ABSOLUTE for value in values)
    return of_rounding or isclose(*values, rel_tol=0, abs_tol=1.01 * max(steps))


def _shown(value: object) -> str:
    """A value in a sentence."""
    text = printable(value)
    return f"'{text[:60]} ...'" if len(text) > 80 else f"'{text}'" if isinstance(value, str) else text
