"""A claim, an identity (JSON) or a fingerprint (anything else)."""

from pathlib import Path

import weightscope as ws
from tests.fuzz.oss import harness
from weightscope.core.errors import CheckpointError
from weightscope.pairs.claims.verify import read_claim
from weightscope.pairs.identity.identity import read_identity
from weightscope.pairs.lineage.sketches import load

SOUND = Path(__file__).parents[2] / "fixtures" / "identity" / "model.id.json"
WSID = "its tensors give "


def meet(folder: Path, content: bytes) -> str:
    """Read it as what it begins like; an identity is sealed anew and compared with a sound one."""
    if not content.lstrip().startswith(b"{"):
        path = folder / "x.wsf"
        path.write_bytes(content)
        return load(path).name
    claim, path = folder / "claim.json", folder / "x.id.json"
    claim.write_bytes(content)
    path.write_bytes(content)
    if b"lineage" in content or b"payload" in content:
        read_claim(claim)
    try:
        read_identity(path)
    except CheckpointError as error:
        _, found, rest = str(error).partition(WSID)
        given, _, told = rest.partition(", not ")
        if not found:
            raise
        path.write_bytes(content.replace(told.split(")")[0].encode(), given.encode()))
    return ws.same(path, SOUND).verdict


if __name__ == "__main__":
    harness.fuzz(
        meet,
        "weightscope.pairs.claims",
        "weightscope.pairs.identity",
        "weightscope.pairs.lineage.sketches",
        "weightscope.checkpoint.storage",
    )
