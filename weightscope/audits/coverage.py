"""What of a checkpoint an audit of its heads reads, and what it therefore says nothing of."""

from collections.abc import Sequence

from weightscope.errors import CheckpointError, sized
from weightscope.model import Model


def tensors_of_heads(model: Model, layers: Sequence[int]) -> list[str]:
    """The tensors that are read to measure the heads of these layers and the embeddings, by name."""
    names = [tensor.name for index in layers for tensor in model.attention_tensors(index)]
    inputs, prefix = model.family.inputs, ""
    try:
        prefix = model.prefix
        names.append(model.embeddings.token_tensor.name)
    except CheckpointError:  # the checkpoint has no token embedding
        pass
    return [name for name in dict.fromkeys([*names, prefix + inputs.positions]) if name in model.checkpoint]


def attention_only(model: Model, layers: Sequence[int]) -> str:
    """How little was read, in a sentence; empty where it was all there is."""
    names, checkpoint = tensors_of_heads(model, layers), model.checkpoint
    if len(names) == len(checkpoint):
        return ""
    share = f"{sized(checkpoint.bytes_to_read(names))} of {sized(checkpoint.nbytes)}"
    return (
        f"Attention only: {len(names)} of {len(checkpoint)} tensors were read ({share}, embeddings included); "
        "--all reads every tensor."
    )
