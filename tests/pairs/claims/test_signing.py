"""Signatures by a local key, by the libraries that others check them with."""

import json
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.commands import is_one_line, run
from tests.support.figures import undrawn

pytest.importorskip("securesystemslib", reason="signatures need the extra attest: securesystemslib, cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

MAKE = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}


def keys(kind: str, folder: Path, password: bytes = b"") -> tuple[Path, Path]:
    """A new pair of keys in files: private, public."""
    key = MAKE[kind]()
    private, public = folder / f"{kind}.pem", folder / f"{kind}.pub"
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(pem, pkcs8, hidden))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def signed(models: Path, private: Path, folder: Path) -> Path:
    with undrawn():
        result = sign(models, private, folder)
    assert result.exit_code == 0, result.output
    return folder / "claim.json"


def sign(models: Path, private: Path, folder: Path) -> Result:
    arguments = [models / "bfloat16", models / "base", "--out", folder / "out", "--attest", folder / "claim.json"]
    return run("lineage", *arguments, "--sign-key", private)


def verified(claim: Path, models: Path, *options: object) -> tuple[int, dict[str, Any]]:
    result = run("verify", claim, models / "bfloat16", models / "base", *options, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("kind", MAKE)
def test_a_claim_is_signed_and_checked(kind: str, models: Path, claims: Path, tmp_path: Path) -> None:
    private, public = keys(kind, tmp_path)
    claim = signed(models, private, tmp_path)
    payload = json.loads(b64decode(json.loads(claim.read_text())["dsseEnvelope"]["payload"]))
    unsigned = json.loads((claims / "bfloat16.json").read_text())
    assert payload["subject"] == unsigned["subject"]
    assert all(
        payload["predicate"][key] == unsigned["predicate"][key] for key in ("verdict", "bases", "parts", "kinds")
    )
    status, answer = verified(claim, models, "--key", public)
    assert (status, answer["signature"], answer["holds"]) == (0, "valid", True)
    assert verified(claim, models)[1]["signature"] == "not checked"


def test_model_signing_accepts_the_signature(models: Path, tmp_path: Path) -> None:
    bundle = pytest.importorskip(
        "model_signing._signing.sign_sigstore_pb", reason="model-signing comes with the development group"
    )
    by_key = pytest.importorskip("model_signing._signing.sign_ec_key")
    private, public = keys("P-256", tmp_path)
    claim = signed(models, private, tmp_path)
    kind, payload = by_key.Verifier(public)._verify_signed_content(bundle.Signature.read(claim))
    assert kind == "application/vnd.in-toto+json"
    assert json.loads(payload)["predicate"]["verdict"] == "derived"
    _, other_key = keys("P-256", tmp_path)
    with pytest.raises(ValueError, match="Key mismatch"):
        by_key.Verifier(other_key)._verify_signed_content(bundle.Signature.read(claim))


def test_a_signature_by_model_signing_is_accepted(models: Path, claims: Path, tmp_path: Path) -> None:
    """It writes numbers of a predicate as protobuf does; they are the same numbers."""
    by_key = pytest.importorskip(
        "model_signing._signing.sign_ec_key", reason="model-signing comes with the development group"
    )
    attestation = pytest.importorskip("in_toto_attestation.v1.statement")
    json_format = pytest.importorskip("google.protobuf.json_format")
    made = attestation.Statement([], "", {})
    json_format.Parse((claims / "bfloat16.json").read_text(), made.pb)
    private, public = keys("P-256", tmp_path)
    payload = type("Payload", (), {"statement": made})()
    by_key.Signer(private).sign(payload).write(tmp_path / "theirs.json")
    status, answer = verified(tmp_path / "theirs.json", models, "--key", public)
    assert (status, answer["signature"]) == (0, "valid"), answer["lead"]


def test_a_signature_by_another_key_does_not_hold(models: Path, claims: Path, tmp_path: Path) -> None:
    private, _ = keys("P-256", tmp_path)
    claim = signed(models, private, tmp_path)
    for kind in MAKE:
        _, other_key = keys(kind, tmp_path)
        status, answer = verified(claim, models, "--key", other_key)
        assert (status, answer["signature"], answer["tier"]) == (3, "not valid", None)
    status, answer = verified(claims / "bfloat16.json", models, "--key", other_key)
    assert (status, answer["signature"]) == (3, "none")
    assert "signature is 'none' in the claim and 'one by the given key' here" in answer["lead"]


def test_an_edited_payload_has_no_valid_signature(models: Path, tmp_path: Path) -> None:
    private, public = keys("P-256", tmp_path)
    claim = signed(models, private, tmp_path)
    bundle = json.loads(claim.read_text())
    envelope = bundle["dsseEnvelope"]
    from base64 import b64encode

    payload = b64decode(envelope["payload"]).replace(b'"derived"', b'"related"')
    envelope["payload"] = b64encode(payload).decode()
    claim.write_text(json.dumps(bundle))
    assert verified(claim, models, "--key", public)[0] == 3
    envelope["signatures"] = [{"sig": "AAAA"}] * 17
    claim.write_text(json.dumps(bundle))
    result = run("verify", claim, models / "bfloat16", models / "base", "--key", public)
    assert is_one_line(result) and "1 to 16 signatures were expected" in result.stderr


def test_what_is_no_key_is_one_clear_error(models: Path, claims: Path, tmp_path: Path) -> None:
    private, public = keys("P-256", tmp_path)
    hidden, _ = keys("P-384", tmp_path, b"secret")
    (tmp_path / "text").write_text("no key")
    for wrong in (public, hidden, tmp_path / "text"):
        result = sign(models, wrong, tmp_path)
        assert is_one_line(result) and "is not an unencrypted private key in PEM" in result.stderr
    claim = signed(models, private, tmp_path)
    for wrong in (private, tmp_path / "text"):
        result = run("verify", claim, models / "bfloat16", models / "base", "--key", wrong)
        assert is_one_line(result) and "is not a public key in PEM" in result.stderr


def test_without_the_extra_a_signature_says_how_to_get_it(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = keys("P-256", tmp_path)
    monkeypatch.setitem(sys.modules, "securesystemslib.dsse", None)
    monkeypatch.delitem(sys.modules, "weightscope.pairs.claims.signing", raising=False)
    result = sign(models, private, tmp_path)
    assert is_one_line(result) and "pip install 'weightscope-attention[attest]'" in result.stderr
    assert not (tmp_path / "out").exists()
