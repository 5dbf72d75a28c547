"""The same mutants read by another program: what both accept is equal, and what one alone accepts has a listed reason.

    python -m tests.fuzz 20000 1 "as safetensors reads" "as gguf reads" "as AutoConfig reads"

Each module has two tables, by a part of the message: why weightscope refuses what the other accepts, and where it is
the other that refuses. A reason that is in neither fails.
"""

from collections.abc import Mapping
from pathlib import Path

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError

Reasons = Mapping[str, str]  # part of a message -> what a reader of the outcome sees
READ = ""  # in place of a message


def opened(path: Path, content: bytes) -> tuple[Checkpoint | None, str]:
    """The checkpoint in a file of this content, or why weightscope refuses it."""
    path.write_bytes(content)
    try:
        return open_checkpoint(path), READ
    except CheckpointError as error:
        return None, str(error)


def outcome(ours: str, theirs: str, stricter: Reasons, laxer: Reasons) -> str:
    """What became of a mutant, by the messages of weightscope and of the other; a one-sided one must be listed."""
    if bool(ours) == bool(theirs):
        return "refused" if ours else "equal"
    who, message, reasons = ("weightscope", ours, stricter) if ours else ("the other", theirs, laxer)
    reason = next((reason for part, reason in reasons.items() if part in message), "")
    assert reason, f"refused by {who} alone, and no reason is listed: {message}"
    return f"refused by {who} alone: {reason}"
