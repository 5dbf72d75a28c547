"""A lineage as an SBOM, CycloneDX 1.6 or SPDX 2.3, with the relation that the weights show.

"related" is no descent: CycloneDX has `pedigree.variants` for it, where it is unclear whether one
is derived from the other, and SPDX has VARIANT_OF, "same lineage but not clear which came first".
Without a common origin there is no relation; the verdict is a property or an annotation then.
"""

from collections.abc import Callable
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

from weightscope.core.errors import printable
from weightscope.pairs.claims.claim import INDEXED
from weightscope.pairs.claims.digests import digests_of, model_digest
from weightscope.pairs.lineage.lineage import Lineage
from weightscope.pairs.lineage.sketches import Sketches

FILES = {"cyclonedx": "sbom.cdx.json", "spdx": "sbom.spdx.json"}
# field of CycloneDX's `pedigree` and SPDX's relationship, by the one that came first
RELATION = {
    "base": ("ancestors", "DESCENDANT_OF"),
    "suspect": ("descendants", "ANCESTOR_OF"),
    None: ("variants", "VARIANT_OF"),
}
FROM_A_PRINT = "known by a fingerprint, whose name for it is its maker's word"
DIGEST = (
    "SHA-256 over the SHA-256 of each file, in the order of their paths, as OpenSSF Model Signing "
    "computes it"
)


def sbom_of(lineage: Lineage, form: str) -> dict[str, Any]:
    """An SBOM of the suspect: `form` is "cyclonedx" or "spdx"."""
    make: Callable[[Lineage], dict[str, Any]] = {"cyclonedx": _cyclonedx, "spdx": _spdx}[form]
    return make(lineage)


def relation(lineage: Lineage) -> tuple[str, str]:
    """The bases' relation to the suspect, in both vocabularies."""
    return RELATION[lineage.came_first]


def relatives(lineage: Lineage) -> list[Sketches]:
    """The bases that share an origin with the suspect: of a merge, all that it takes from."""
    names = lineage.weights.keys() | {lineage.base}
    return [each.base for each in lineage.compared if each.base.name in names]


def _files_of(sketches: Sketches) -> dict[str, str]:
    """A model's files by digest; none of a fingerprint, which does not know them."""
    return {} if sketches.source is None else digests_of(sketches.source)


def _identity(lineage: Lineage) -> UUID:
    """An SBOM's UUID, from the suspect's files and the date of the lineage."""
    digest = model_digest(_files_of(lineage.suspect))
    return uuid5(NAMESPACE_URL, f"{digest} {lineage.provenance.date}")


def _tool(lineage: Lineage) -> str:
    return f"weightscope-{lineage.provenance.version}"


# CycloneDX


def _cyclonedx(lineage: Lineage) -> dict[str, Any]:
    """CycloneDX 1.6."""
    model = _component(lineage.suspect, "suspect")
    if bases := relatives(lineage):
        field, _ = relation(lineage)
        components = [_component(base, f"base-{i}") for i, base in enumerate(bases)]
        model["pedigree"] = {field: components, "notes": printable(lineage.lead)}
    summary = {
        "verdict": lineage.verdict,
        "lead": printable(lineage.lead),
        "p_value": f"{lineage.p_value:.3g}",
    }
    model["properties"] += [
        {"name": f"weightscope:{name}", "value": value} for name, value in summary.items()
    ]
    tool = {"type": "application", "name": "weightscope", "version": lineage.provenance.version}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{_identity(lineage)}",
        "version": 1,
        "metadata": {
            "timestamp": lineage.provenance.date,
            "tools": {"components": [tool]},
            "component": model,
        },
    }


def _component(sketches: Sketches, reference: str) -> dict[str, Any]:
    """A model, with its files."""
    digests = _files_of(sketches)
    component: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": printable(sketches.name),
        "properties": [],
    }
    if digests:
        component["hashes"] = _hashes(model_digest(digests))
        component["properties"].append({"name": "weightscope:digest", "value": DIGEST})
        component["components"] = [
            {
                "type": "file",
                "bom-ref": f"{reference}/{i}",
                "name": printable(name),
                "hashes": _hashes(digest),
            }
            for i, (name, digest) in enumerate(digests.items())
        ]
    if sketches.source is None:
        tier = {"name": "weightscope:tier", "value": f"{INDEXED}: {FROM_A_PRINT}"}
        component["properties"].append(tier)
    return component


def _hashes(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


# SPDX


def _spdx(lineage: Lineage) -> dict[str, Any]:
    """SPDX 2.3."""
    bases = relatives(lineage)
    models = {
        "SPDXRef-suspect": lineage.suspect,
        **{f"SPDXRef-base-{i}": base for i, base in enumerate(bases)},
    }
    packages, related = [], [_related("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-suspect")]
    for reference, sketches in models.items():
        digests = _files_of(sketches)
        comment = DIGEST if digests else FROM_A_PRINT
        whole = model_digest(digests) if digests else ""
        packages.append(_package(reference, sketches.name, whole, "OTHER", comment))
        for i, (name, digest) in enumerate(digests.items()):
            packages.append(_package(f"{reference}-file-{i}", name, digest, "FILE"))
            related.append(_related(reference, "CONTAINS", f"{reference}-file-{i}"))
    _, kind = relation(lineage)
    lead = printable(lineage.lead)
    for i in range(len(bases)):
        related.append(_related("SPDXRef-suspect", kind, f"SPDXRef-base-{i}", lead))
    created = lineage.provenance.date
    annotation = {
        "annotationType": "REVIEW",
        "annotator": f"Tool: {_tool(lineage)}",
        "annotationDate": created,
        "comment": f"{lineage.verdict}: {lead}",
    }
    packages[0]["annotations"] = [annotation]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": printable(lineage.suspect.name),
        "documentNamespace": f"https://weightscope/sbom/{_identity(lineage)}",
        "creationInfo": {"created": created, "creators": [f"Tool: {_tool(lineage)}"]},
        "packages": packages,
        "relationships": related,
    }


def _package(
    reference: str, name: str, digest: str, purpose: str, comment: str = ""
) -> dict[str, Any]:
    package: dict[str, Any] = {
        "SPDXID": reference,
        "name": printable(name),
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "primaryPackagePurpose": purpose,
    }
    if digest:
        package["checksums"] = [{"algorithm": "SHA256", "checksumValue": digest}]
    return package | ({"comment": comment} if comment else {})


def _related(element: str, kind: str, other: str, comment: str = "") -> dict[str, str]:
    relationship = {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": other}
    return relationship | ({"comment": comment} if comment else {})
