"""What entered an attention layer: whatever may be called the stream of its queries, and that of its keys."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Event:
    """One call of one module."""

    name: str
    module: torch.nn.Module
    start: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    end: int = 0


def rows_of(of: torch.Tensor, b: int, n: int) -> np.ndarray | None:
    """A tensor as (sequences, tokens, width), if it has so many tokens; whichever of its axes are the tokens'."""
    if of.dtype == torch.bool or (of.ndim == 4 and of.shape[1] == 1):  # masks
        return None
    if of.ndim < 2 or of.numel() != b * n * of.shape[-1] or of.shape[-1] < 2:
        return None
    return of.reshape(b, n, -1).float().numpy()


def entering(
    layer: Event, attends: Event, inside: list[Event], at: int, b: int, n: int, m: int
) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """Candidates for the stream of queries, and for that of keys where it is another; the norm the former enters."""
    before = [event for event in inside if event.end < at]
    own = [event for event in before if event.start > attends.start and isinstance(event.module, torch.nn.Linear)]
    arrive = first_of(attends.inputs, b, n)
    if arrive is None:
        return [], [], ""
    whole = first_of(layer.inputs, b, n)
    through, norm = _before_norm(arrive, before, attends)
    if whole is not None and (
        np.array_equal(whole, arrive) or (through is not None and np.array_equal(whole, through))
    ):
        streams = [whole]
    else:
        streams = [one for one in (through, arrive, whole) if one is not None]
    read = [one for event in own for one in event.inputs[:1]]
    second = first_of(read + attends.inputs, b, m) if m != n else _second(read, arrive, b, n)
    inner = None if second is None else _before_norm(second, before, attends)[0]
    return streams, [one for one in (second, inner) if one is not None], norm


def _second(read: list[torch.Tensor], arrive: np.ndarray, b: int, n: int) -> np.ndarray | None:
    """What keys and values are made of where that is not what queries are, though it is as long."""
    rows = [own for one in read if (own := rows_of(one, b, n)) is not None]
    if len(rows) < 3 or len(rows) < len(read) or not np.array_equal(rows[0], arrive):
        return None
    others = all(np.array_equal(one, rows[1]) for one in rows[2:])
    return None if not others or np.array_equal(rows[1], arrive) else rows[1]


def around(
    layer: Event, attends: Event, inside: list[Event], at: int, b: int, n: int, m: int
) -> list[np.ndarray]:  # fmt: skip
    """Everything of n or m rows that entered the layer, its attention or a projection of that, or left a norm; once."""
    given = [*attends.inputs, *layer.inputs]
    for event in inside:
        if event.start > attends.start and event.end < at and isinstance(event.module, torch.nn.Linear):
            given += event.inputs[:1]
        elif event.end < at and "norm" in type(event.module).__name__.lower():
            given += event.outputs[:1]
    found = [rows for one in given for tokens in {n, m} if (rows := rows_of(one, b, tokens)) is not None]
    return list({(rows.shape, rows.tobytes()): rows for rows in found}.values())


def first_of(tensors: list[torch.Tensor], b: int, n: int) -> np.ndarray | None:
    return next((rows for one in tensors if (rows := rows_of(one, b, n)) is not None), None)


def _before_norm(arrive: np.ndarray, before: list[Event], attends: Event) -> tuple[np.ndarray | None, str]:
    """What entered the norm that made these rows, in their order, and which; None where no norm of the layer did."""
    wanted = arrive.reshape(-1, arrive.shape[-1])
    for event in reversed(before):
        if (
            "norm" not in type(event.module).__name__.lower()
            or not event.inputs
            or not event.outputs
            or event is attends
        ):
            continue
        made, of = event.outputs[0], event.inputs[0]
        if made.shape != of.shape or made.shape[-1] != wanted.shape[-1]:
            continue
        rows = {row.tobytes(): i for i, row in enumerate(made.reshape(-1, made.shape[-1]).float().numpy())}
        places = [rows.get(row.tobytes()) for row in wanted.astype(np.float32)]
        if None not in places:
            return of.reshape(-1, of.shape[-1]).float().numpy()[np.array(places)].reshape(arrive.shape), event.name
    return None, ""
