"""What a claim is, by the libraries of those who read it."""

import json
from pathlib import Path
from typing import Any

import pytest

import weightscope as ws
from tests.support.commands import is_one_line, run
from tests.support.two_layers import TWO_LAYERS
from weightscope.pairs.claims.claim import FIELDS, JUDGED, statement
from weightscope.pairs.claims.digests import digests_of, model_digest


def claim_in(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_claim_says_what_lineage_says(claims: Path) -> None:
    claim, lineage = claim_in(claims / "bfloat16.json")["predicate"], claim_in(claims / "bfloat16" / "lineage.json")
    assert claim.keys() == FIELDS and claim["tier"] == "verified by weights"
    assert claim["parts"] == lineage.get("parts", {})
    for field in ("lead", "verdict", "base", "p_value", "comparisons", "kinds", "weights", "doubts", "version"):
        assert claim[field] == lineage[field], field
    assert claim["direction"] == {"first": "base", "shown_by": "rounding to a coarser float"}
    assert [layer["base_layer"] for layer in claim["layers"]] == [0, 1, 2, 3, 4]
    assert all(row[key] == layer[key] for row, layer in zip(lineage["alignment"], claim["layers"], strict=True)
               for key in ("layer", "base", "likeness", "z"))  # fmt: skip
    assert claim_in(claims / "by-print.json")["predicate"]["tier"] == "indexed"


def test_lineage_json_has_the_digests_of_whole_files_too(claims: Path) -> None:
    for source in claim_in(claims / "bfloat16" / "lineage.json")["sources"]:
        assert all("sha256" in file for file in source["files"])


def test_digests_are_those_of_model_signing(models: Path, claims: Path) -> None:
    """Of the files that were read: a published signature of the whole folder names these among others."""
    hashing = pytest.importorskip("model_signing.hashing", reason="model-signing comes with the development group")
    signing = pytest.importorskip("model_signing._signing.signing")
    claim = claim_in(claims / "bfloat16.json")
    of_folder = {each.identifier: each.digest.digest_hex
                 for each in hashing.hash(models / "base").resource_descriptors()}  # fmt: skip
    named = {each["name"]: each["digest"]["sha256"] for each in claim["predicate"]["bases"][0]["files"]}
    assert named.items() < of_folder.items() and "README.md" in of_folder
    for name in ("base", "bfloat16", "two-shards"):
        digests = digests_of(ws.open_model(models / name))
        assert len(digests) == (3 if name == "two-shards" else 2)
        read = [models / name / file for file in digests]
        manifest = hashing.Config().hash(models / name, files_to_hash=read)
        payload = signing.Payload(manifest).statement.pb
        assert payload.subject[0].digest["sha256"] == model_digest(digests)
        assert [each.identifier for each in manifest.resource_descriptors()] == list(digests)
    assert claim["predicate"]["suspect"]["digest"]["sha256"] == model_digest(
        digests_of(ws.open_model(models / "bfloat16"))
    )


def test_a_claim_is_a_statement_of_in_toto(claims: Path) -> None:
    attestation = pytest.importorskip(
        "in_toto_attestation.v1.statement", reason="in-toto-attestation comes with the development group"
    )
    json_format = pytest.importorskip("google.protobuf.json_format")
    for path in claims.glob("*.json"):
        made = attestation.Statement([], "", {})
        json_format.Parse(path.read_text(), made.pb)
        made.validate()
        assert json_format.MessageToDict(made.pb) == claim_in(path)


def test_python_makes_the_same_claim(models: Path, claims: Path) -> None:
    written = claim_in(claims / "bfloat16.json")
    nonce = written["predicate"]["probes"]["nonce"]
    made = statement(ws.lineage(models / "bfloat16", models / "base", nonce=nonce))
    assert made["subject"] == written["subject"]
    assert {field: made["predicate"][field] for field in JUDGED} == {
        field: written["predicate"][field] for field in JUDGED
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["base.wsf", "base", "--attest", "x.json"], "base.wsf: is a fingerprint; --attest and --sbom are about files"),
        (["base", ".", "--sbom", "spdx"], "is a folder of fingerprints; a claim or an SBOM names a file"),
        ([".", "base", "--attest", "x.json"], "is a folder of fingerprints; a claim or an SBOM names a file"),
    ],
)
def test_what_a_claim_cannot_be_about_is_refused(
    arguments: list[str], expected: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    result = run("lineage", *arguments, "--out", tmp_path / "out")
    assert is_one_line(result) and expected in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_key_without_a_claim_is_refused(models: Path, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("")
    result = run("lineage", TWO_LAYERS, TWO_LAYERS, "--out", tmp_path / "out", "--sign-key", tmp_path / "key.pem")
    assert result.exit_code == 2 and "--sign-key needs --attest" in result.stderr


def test_an_adapter_is_merged_first(tmp_path: Path) -> None:
    """Its files are in two folders, and a claim names one model."""
    golden = Path(__file__).parents[2] / "checkpoint" / "golden" / "adapters"
    folder = min(golden.iterdir())
    model = ws.open_model(folder / "adapter", base=folder / "base")
    with pytest.raises(ws.CheckpointError, match=r"is read from several folders.*merge the adapter for a claim"):
        statement(ws.lineage(model, folder / "base"))
    arguments = ["lineage", folder / "adapter", folder / "base", "--base", folder / "base", "--out", tmp_path / "out"]
    for option in (["--attest", tmp_path / "claim.json"], ["--sbom", "spdx"]):
        result = run(*arguments, *option)
        assert is_one_line(result) and "is an adapter: merge the adapter for a claim or an SBOM" in result.stderr
    assert not (tmp_path / "out" / "lineage.json").exists()
