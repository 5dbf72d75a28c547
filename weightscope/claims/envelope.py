"""The file of a claim: a statement, bare, in a DSSE envelope, or in a Sigstore bundle."""

from base64 import b64decode
from pathlib import Path
from typing import Any, NamedTuple

from weightscope.checkpoint.config import MAX_BYTES, parse_json, read_small
from weightscope.errors import CheckpointError, one_line, printable

PAYLOAD = "application/vnd.in-toto+json"
MOST_SIGNATURES = 16


class Opened(NamedTuple):
    """A statement, and the envelope that it was in; None if it is not signed."""

    statement: dict[str, Any]
    envelope: dict[str, Any] | None = None


def opened_claim(path: Path) -> Opened:
    """The statement in a file. No signature is checked."""
    value = parse_json(read_small(path, MAX_BYTES), file=path)
    if "dsseEnvelope" in value:
        value = value["dsseEnvelope"] if isinstance(value["dsseEnvelope"], dict) else {"payload": ""}
    if "payload" not in value:
        return Opened(value)
    signatures = value.get("signatures")
    try:
        if value.get("payloadType") != PAYLOAD:
            raise ValueError(f"payloadType is '{printable(value.get('payloadType'))[:80]}'; {PAYLOAD} was expected")
        if not isinstance(signatures, list) or not 0 < len(signatures) <= MOST_SIGNATURES:
            raise ValueError(f"1 to {MOST_SIGNATURES} signatures were expected")
        for signature in signatures:
            b64decode(signature["sig"], validate=True)
        payload = b64decode(value["payload"], validate=True)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"is a damaged envelope ({one_line(error)})", file=path) from None
    return Opened(parse_json(payload, file=path, what="its payload "), value)
