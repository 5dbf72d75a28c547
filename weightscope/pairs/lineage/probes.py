"""Random signs of sketches: public, drawn from a key, or drawn once the weights are fixed.

A sketch is linear in the weights, so anyone who knows its signs can forge a checkpoint with
another's sketches. Fingerprints that anybody may compare need public signs. Where the weights of
both are at hand, signs are drawn from SHA-256 of what both checkpoints hold and a nonce: weights
that were made for some signs get others.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from weightscope.checkpoint.blocks import blocks_of
from weightscope.checkpoint.checkpoint import StoredTensor, Tensor
from weightscope.checkpoint.config import read_small
from weightscope.core.compute.cores import in_threads
from weightscope.core.errors import CheckpointError
from weightscope.model.model import Model

LEAST_KEY_BYTES = 16  # bytes of a key file; 128 bits cannot be guessed
MOST_KEY_BYTES = 1 << 20  # bytes of a key file
PIECE = 4 << 20  # bytes read at a time for a digest


@dataclass(frozen=True)
class Probes:
    """The source of signs."""

    seed: str = ""  # hexadecimal; empty for the public signs
    nonce: str = ""  # input of the seed besides digests; empty if it was made otherwise
    digests: tuple[str, ...] = ()  # inputs of the seed: digests of heads

    @property
    def name(self) -> str:
        """The name of these signs in a fingerprint, without the seed; empty for public ones."""
        if not self.seed:
            return ""
        return sha256(f"weightscope probes {self.seed}".encode()).hexdigest()[:16]


PUBLIC = Probes()


def keyed_probes(key: str | Path) -> Probes:
    """Signs drawn from a key file.

    Raises
    ------
    CheckpointError
        It cannot be read, or is too short to be secret.
    """
    path = Path(key)
    content = read_small(path, MOST_KEY_BYTES)
    if len(content) < LEAST_KEY_BYTES:
        least = f"a key has at least {LEAST_KEY_BYTES}, as `head -c 32 /dev/urandom` makes"
        raise CheckpointError(f"has {len(content)} bytes; {least}", file=path)
    return Probes(sha256(b"weightscope key " + content).hexdigest())


def drawn_probes(models: Sequence[Model], nonce: str | None = None) -> Probes:
    """Signs for which these checkpoints cannot have been prepared.

    The seed is SHA-256 of the digests of their heads and a nonce, drawn if not given. Digests are
    sorted, so that both directions of a comparison have the same signs.
    """
    nonce = secrets.token_hex(16) if nonce is None else nonce
    digests = tuple(sorted({digest_of_heads(model) for model in models}))
    return Probes(sha256("\n".join([*digests, nonce]).encode()).hexdigest(), nonce, digests)


def digest_of_heads(model: Model) -> str:
    """SHA-256 of all that a sketch depends on: attention and token embeddings, as stored."""
    tensors = {
        tensor.name: tensor for i in model.attention_layers for tensor in model.attention_tensors(i)
    }
    with suppress(CheckpointError):  # there are no embeddings
        tensors |= {tensor.name: tensor for tensor in model.ends.input_tensors}
    in_order = [tensors[name] for name in sorted(tensors)]
    combined = sha256()
    for tensor, digest in zip(in_order, in_threads(_digest, in_order), strict=True):
        combined.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {digest}\n".encode())
    return combined.hexdigest()


def _digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, or of its values if it is not stored as a tensor."""
    digest = sha256()
    if isinstance(tensor, StoredTensor):
        for start in range(0, tensor.nbytes, PIECE):
            digest.update(tensor.raw(start, min(start + PIECE, tensor.nbytes)))
    else:
        for block in blocks_of(tensor):
            digest.update(np.ascontiguousarray(block.values()))
    return digest.hexdigest()


@lru_cache(maxsize=16)  # every head needs the same ones
def signs(count: int, width: int, side: str, probes: Probes = PUBLIC) -> np.ndarray:
    """Random signs (count, width), the same on every machine and with every NumPy: float32."""
    words = -(-count * width // 64)
    text = f"weightscope {side} {width}" + (f" {probes.seed}" if probes.seed else "")
    seed = int.from_bytes(sha256(text.encode()).digest()[:16], "little")
    raw = np.random.PCG64(seed).random_raw(words)  # raw output, unlike a Generator's, never changes
    bits = np.unpackbits(raw.astype("<u8").view(np.uint8), count=count * width)
    return (bits.astype(np.float32) * 2 - 1).reshape(count, width)
