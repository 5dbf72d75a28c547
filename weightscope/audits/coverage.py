"""What of a checkpoint an audit of its heads reads, and what it therefore says nothing of."""

from collections.abc import Sequence
from contextlib import suppress

from weightscope.checkpoint import Checkpoint
from weightscope.errors import CheckpointError, sized
from weightscope.model import Model


def tensors_of_heads(model: Model, layers: Sequence[int], tokens_read: bool = False) -> list[str]:
    """The tensors that are read to measure the heads of these layers and the embeddings, by name.

    Parameters
    ----------
    model : Model
    layers : sequence of int
    tokens_read : bool
        The tokens that heads write were read too, through the unembedding.
    """
    names = [tensor.name for index in layers for tensor in model.attention_tensors(index)]
    names.append(model.prefix + model.family.inputs.positions)
    with suppress(CheckpointError):  # the checkpoint has no token embedding
        names.append(model.embeddings.token_tensor.name)
    with suppress(CheckpointError):  # nor an unembedding
        names += [model.unembedding.tensor.name] if tokens_read else []
    return [name for name in dict.fromkeys(names) if name in model.checkpoint]


def other_stacks(model: Model) -> str:
    """What else of attention is in a checkpoint, in a sentence; empty where this model is all there is."""
    own = model.prefix + model.family.layer + model.family.query
    others = []
    for name, stack in model.stacks.items():
        if stack.family is None or stack.prefix + stack.family.layer + stack.family.query != own:
            others.append(name + " (not read)" * bool(stack.refusal))
    if not others:
        return ""
    return f"The file has other stacks of attention, each a `tower` of its own: {', '.join(others)}."


def attention_only(checkpoint: Checkpoint, names: Sequence[str], included: str = "") -> str:
    """How little was read, in a sentence; empty where it was all there is.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : sequence of str
        What was read.
    included : str
        What of it is not attention's.
    """
    if len(names) == len(checkpoint):
        return ""
    share = f"{sized(checkpoint.bytes_to_read(names))} of {sized(checkpoint.nbytes)}"
    return (
        f"Attention only: {len(names)} of {len(checkpoint)} tensors were read ({share}{included}); "
        "`weightscope audit --all` and `compare --all` read every tensor."
    )
