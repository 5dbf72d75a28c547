"""SBOMs say what the verdict says and no more, and the libraries of their formats accept them."""

import json
from pathlib import Path
from typing import Any

import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.figures import undrawn
from weightscope.pairs.claims.sbom import FILES, sbom_of
from weightscope.pairs.lineage.lineage import Lineage

CASES = {  # the suspect, its bases, and what the SBOM says: CycloneDX's field of pedigree, SPDX's relationship
    "derived": (("bfloat16", ["base"]), "ancestors", "DESCENDANT_OF"),
    "derived the other way": (("base", ["bfloat16"]), "descendants", "ANCESTOR_OF"),
    "related": (("drift-3", ["base"]), "variants", "VARIANT_OF"),
    "same bytes": (("two-shards", ["base"]), "variants", "VARIANT_OF"),
    "unrelated": (("stranger", ["base"]), None, None),
    "undecided": (("stranger", ["base.wsf"]), None, None),
    "by a fingerprint": (("bfloat16", ["base.wsf"]), "variants", "VARIANT_OF"),
    "one of two": (("bfloat16", ["stranger", "base"]), "ancestors", "DESCENDANT_OF"),
}
VERDICT = {"ancestors": "derived", "descendants": "related", "variants": "related", None: None}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, models: Path) -> tuple[Lineage, str | None, str | None]:
    (suspect, bases), field, kind = CASES[request.param]
    lineage = ws.lineage(models / suspect, [models / base for base in bases])
    assert lineage.verdict == {"unrelated": "unrelated", "undecided": "undecided"}.get(request.param, VERDICT[field])
    return lineage, field, kind


def test_cyclonedx_says_what_the_verdict_says(case: tuple[Lineage, str | None, str | None]) -> None:
    lineage, field, _ = case
    model = sbom_of(lineage, "cyclonedx")["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    properties = {each["name"]: each["value"] for each in model["properties"]}
    assert properties["weightscope:verdict"] == lineage.verdict and properties["weightscope:lead"] == lineage.lead
    if field is None:
        assert "pedigree" not in model
        return
    assert model["pedigree"].keys() == {field, "notes"} and model["pedigree"]["notes"] == lineage.lead
    (base,) = model["pedigree"][field]
    assert base["name"] == lineage.base
    has_digests = all(each.base.source is not None for each in lineage.compared)
    assert ("hashes" in base) == has_digests == bool(base.get("components"))


def test_spdx_says_what_the_verdict_says(case: tuple[Lineage, str | None, str | None]) -> None:
    lineage, _, kind = case
    document = sbom_of(lineage, "spdx")
    between = [each for each in document["relationships"] if each["relationshipType"] not in ("DESCRIBES", "CONTAINS")]
    assert [each["relationshipType"] for each in between] == ([] if kind is None else [kind])
    assert all(each["comment"] == lineage.lead for each in between)
    (annotation,) = document["packages"][0]["annotations"]
    assert annotation["comment"] == f"{lineage.verdict}: {lineage.lead}"


def test_cyclonedx_is_valid(case: tuple[Lineage, str | None, str | None]) -> None:
    """By the library's own copy of the schema; strict: unknown keys are refused."""
    json_validation = pytest.importorskip(
        "cyclonedx.validation.json", reason="cyclonedx-python-lib comes with the development group"
    )
    schema = pytest.importorskip("cyclonedx.schema")
    made = sbom_of(case[0], "cyclonedx")
    validator = json_validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(made)) is None
    made["metadata"]["component"]["type"] = "model"
    assert validator.validate_str(json.dumps(made)) is not None


def test_spdx_is_valid(case: tuple[Lineage, str | None, str | None], tmp_path: Path) -> None:
    parser = pytest.importorskip(
        "spdx_tools.spdx.parser.parse_anything", reason="spdx-tools comes with the development group"
    )
    validation = pytest.importorskip("spdx_tools.spdx.validation.document_validator")
    (tmp_path / "sbom.spdx.json").write_text(json.dumps(sbom_of(case[0], "spdx")))
    document = parser.parse_file(str(tmp_path / "sbom.spdx.json"))
    assert validation.validate_full_spdx_document(document) == []
    document.packages[0].spdx_id = "suspect"
    assert validation.validate_full_spdx_document(document)


def test_digests_are_those_of_the_claim(models: Path, claims: Path) -> None:
    lineage = ws.lineage(models / "bfloat16", models / "base")
    claim: Any = json.loads((claims / "bfloat16.json").read_text())
    wanted = {each["name"]: each["digest"]["sha256"] for each in claim["subject"]}
    model = sbom_of(lineage, "cyclonedx")["metadata"]["component"]
    assert {each["name"]: each["hashes"][0]["content"] for each in model["components"]} == wanted
    assert model["hashes"][0]["content"] == claim["predicate"]["suspect"]["digest"]["sha256"]
    packages = {each["name"]: each for each in sbom_of(lineage, "spdx")["packages"] if "suspect" in each["SPDXID"]}
    assert {name: packages[name]["checksums"][0]["checksumValue"] for name in wanted} == wanted


def test_a_merge_names_every_base(models: Path) -> None:
    lineage = ws.lineage(models / "bfloat16", [models / "base", models / "drift-3"])
    merged = Lineage(
        lineage.suspect, lineage.compared, lineage.origin, "related", 0.0, 6, weights={"base": 0.5, "drift-3": 0.5}
    )
    pedigree = sbom_of(merged, "cyclonedx")["metadata"]["component"]["pedigree"]
    assert [each["name"] for each in pedigree["variants"]] == ["base", "drift-3"]


@pytest.mark.parametrize("form", FILES)
def test_the_command_writes_it_into_out(form: str, models: Path, tmp_path: Path) -> None:
    with undrawn():
        result = run("lineage", models / "bfloat16", models / "base", "--out", tmp_path, "--sbom", form)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / FILES[form]).read_text())
    assert "derived" in json.dumps(written)
    with undrawn():
        assert run("lineage", models / "bfloat16", models / "base", "--out", tmp_path).exit_code == 0
    assert not (tmp_path / FILES[form]).exists(), "it belonged to the earlier run"
