"""The same mutants read by another program: what both accept is equal, and what one alone accepts has a listed reason.

    python -m tests.fuzz 20000 1 "as safetensors reads" "as gguf reads" "as AutoConfig reads"

Each module has two tables, by a part of the message: why weightscope refuses what the other accepts, and where it is
the other that refuses. A reason that is in neither fails.
"""

from collections.abc import Mapping

Reasons = Mapping[str, str]  # part of a message -> what a reader of the outcome sees
READ = ""  # in place of a message


def outcome(ours: str, theirs: str, stricter: Reasons, laxer: Reasons) -> str:
    """What became of a mutant, by the messages of weightscope and of the other; a one-sided one must be listed."""
    if bool(ours) == bool(theirs):
        return "refused" if ours else "equal"
    who, message, reasons = ("weightscope", ours, stricter) if ours else ("the other", theirs, laxer)
    reason = next((reason for part, reason in reasons.items() if part in message), "")
    assert reason, f"refused by {who} alone, and no reason is listed: {message}"
    return f"refused by {who} alone: {reason}"
