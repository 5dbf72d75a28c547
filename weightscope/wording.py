"""Numbers in sentences."""


def counted(count: int, noun: str) -> str:
    """A number of things: "1 head", "12 heads", "1,024 heads"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
