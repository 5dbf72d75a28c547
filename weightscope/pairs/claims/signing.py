"""Sign claims with a key on this machine: a DSSE envelope in a Sigstore bundle, offline.

The bundle is what `model_signing sign key` writes, so its verifier accepts the signature. This
module needs the extra `attest`; writing and reading claims does not.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey

from weightscope.checkpoint.config import read_small
from weightscope.core.errors import CheckpointError, one_line
from weightscope.pairs.claims.claim import PAYLOAD

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
LARGEST_KEY = 100_000  # bytes
PRIVATE = "an unencrypted private key in PEM (ECDSA P-256 or P-384, Ed25519 or RSA)"
PUBLIC = "a public key in PEM (ECDSA P-256 or P-384, Ed25519 or RSA)"


def _key(path: Path, made: Callable[[bytes], Any], wanted: str) -> Any:
    """A key from a file."""
    text = read_small(path, LARGEST_KEY)
    try:
        return made(text)
    except Exception as error:  # ValueError, TypeError, UnsupportedAlgorithm and the libraries' own
        raise CheckpointError(f"is not {wanted}: {one_line(error)}", file=path) from None


def signing_key(path: Path) -> CryptoSigner:
    """A signer with the private key in a file."""
    return _key(path, lambda text: CryptoSigner(load_pem_private_key(text, None)), PRIVATE)


def signed(statement: dict[str, Any], key: CryptoSigner) -> dict[str, Any]:
    """A Sigstore bundle with the statement and its signature."""
    envelope = Envelope(json.dumps(statement, indent=1).encode(), PAYLOAD, {})
    signature = bytes.fromhex(envelope.sign(key).signature)
    hint = sha256(key.public_key.keyval["public"].encode()).hexdigest()
    return {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": b64encode(envelope.payload).decode(),
            "payloadType": PAYLOAD,
            "signatures": [{"sig": b64encode(signature).decode(), "keyid": ""}],
        },
    }


def is_signed_by(envelope: dict[str, Any], path: Path) -> bool:
    """True if one of an envelope's signatures is by the private key of this public one."""
    key = _key(path, lambda text: SSlibKey.from_crypto(load_pem_public_key(text)), PUBLIC)
    content = Envelope(b64decode(envelope["payload"]), PAYLOAD, {}).pae()
    return any(_is_by(key, b64decode(each["sig"]), content) for each in envelope["signatures"])


def _is_by(key: SSlibKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify_signature(Signature(key.keyid, signature.hex()), content)
    except UnverifiedSignatureError:
        return False
    return True
