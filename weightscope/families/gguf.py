"""A GGUF file as the checkpoint that it was converted from: what the conversion changed is undone.

Names become Hugging Face's again, and the file's keys a config. Rows of Q and K go back to their places: ggml rotates
neighbouring coordinates, Hugging Face the two halves of a head.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightscope.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.gguf_file import GgufFile, GgufTensor
from weightscope.checkpoint.tensor import StoredTensor, WholeTensor
from weightscope.errors import CheckpointError
from weightscope.families.family import Family, Gguf

# Meaning in config.json -> key after the architecture's name.
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
ROPE_FACTORS = "rope_freqs.weight"
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192  # of the rotations of every Llama 3; only the factor differs


def as_published(checkpoint: Checkpoint, families: Sequence[Family]) -> Checkpoint:
    """The checkpoint under Hugging Face's names and in Hugging Face's order; one that is not GGUF as it is.

    Raises
    ------
    CheckpointError
        The file is of an architecture that is not read, or says what cannot be.
    """
    if not isinstance(checkpoint.files[0], GgufFile):
        return checkpoint
    named, file = checkpoint.config.get("general.architecture"), checkpoint.config.file
    rows = [(row, row.gguf) for row in families if row.gguf is not None]
    row, gguf = next(((row, gguf) for row, gguf in rows if gguf.architecture == named), (None, None))
    if row is None or gguf is None:
        known = ", ".join(dict.fromkeys(gguf.architecture for _, gguf in rows))
        raise CheckpointError(f"is of architecture '{str(named)[:40]}'; read are {known}", file=file)
    config = {"model_type": row.model_types[0], **_config(checkpoint.config, gguf.architecture)}
    n_heads = {row.query: config["num_attention_heads"], row.key: config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    for name, stored in checkpoint.items():
        if name == ROPE_FACTORS:
            config["rope_scaling"] = _llama3_scaling(stored.read(), Config(config, file))
            continue
        module, full = _published_name(name, row, gguf)
        if full in tensors:
            raise CheckpointError("has two tensors that mean the same", file=file, tensor=name)
        renamed = replace(stored, name=full) if isinstance(stored, GgufTensor) else stored
        tensors[full] = PermutedTensor(renamed, n_heads[module]) if gguf.permuted and module in n_heads else renamed
    tokens = tensors.get(row.prefixes[0] + row.inputs.tokens)
    config["vocab_size"] = tokens.shape[0] if tokens is not None and tokens.shape else None
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return Checkpoint(checkpoint.folder, checkpoint.files, tensors, Config(config, file), checkpoint.name)


def _published_name(name: str, row: Family, gguf: Gguf) -> tuple[str, str]:
    """`blk.3.attn_q.weight`: self_attn.q_proj, model.layers.3.self_attn.q_proj.weight; unknown names as they are."""
    parts = re.fullmatch(r"(?:blk\.(\d{1,7})\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if not parts or parts[2] not in gguf.modules:
        return "", name
    module = gguf.modules[parts[2]]
    layer = row.prefixes[0] + row.layer.format(i=int(parts[1])) if parts[1] else ""
    return module, f"{layer}{module}.{parts[3]}"


def _config(keys: Config, architecture: str) -> dict[str, Any]:
    """What config.json would say."""

    def given(key: str) -> Any:
        return keys.get(f"{architecture}.{key}")

    values = {meaning: _shortest(given(key)) for meaning, key in KEYS.items() if given(key) is not None}
    config = Config(values, keys.file)
    heads = config.size("num_attention_heads")
    values["num_key_value_heads"] = config.size("num_key_value_heads", default=heads)
    head_dim = config.size("head_dim", default=config.size("hidden_size") // heads)
    scaling = given("rope.scaling.type") or "none"
    if scaling == "linear":
        values["rope_scaling"] = {"rope_type": "linear", "factor": given("rope.scaling.factor")}
    elif scaling != "none":
        raise CheckpointError(f"scales its rotations by '{str(scaling)[:40]}', which is not read", file=keys.file)
    if (given("rope.dimension_count") or head_dim) != head_dim:
        raise CheckpointError("rotates a part of each head alone, which is not read", file=keys.file)
    if given("expert_count"):
        raise CheckpointError("has experts; mixtures under this architecture are not read", file=keys.file)
    return values


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that means it: 1e-05 where the file has 9.999999747378752e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _llama3_scaling(stored: np.ndarray, config: Config) -> dict[str, Any]:
    """Llama 3's scaling of rotations: a file has the factors it amounts to, which tell it and are checked by it."""
    factors = stored.reshape(-1).astype(np.float64)
    theta, factor = config.number("rope_theta", default=10000.0, smallest=1.001), float(factors.max(initial=1.0))
    if not len(factors) or factors.min() <= 0:
        raise CheckpointError("scales its rotations by factors that are not above 0", file=config.file)
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((ORIGINAL / wavelengths - LOW) / (HIGH - LOW), 0, 1)
    if not np.allclose(1 / factors, (1 - smooth) / factor + smooth, rtol=1e-3):
        raise CheckpointError("scales its rotations in a way that is not Llama 3's", file=config.file)
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }  # fmt: skip


@dataclass(frozen=True)
class PermutedTensor(WholeTensor):
    """Q or K (or its bias), its rows put back: within a head ggml has them 0, r/2, 1, r/2 + 1 ...

    Attributes
    ----------
    stored : Tensor
    n_heads : int
        Heads of this projection: key-value heads for K.
    """

    stored: Tensor
    n_heads: int

    def __post_init__(self) -> None:
        if not self.shape or self.shape[0] % (2 * self.n_heads):
            raise self.stored.refuse(f"has shape {self.shape}, which {self.n_heads} heads do not divide")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.stored.name

    @property
    def file(self) -> Any:  # type: ignore[override]
        return self.stored.file

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.stored.parts

    @property
    def noted(self) -> set[str] | None:  # type: ignore[override]
        return self.stored.noted

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(noted))

    def read(self) -> np.ndarray:
        rows = self.stored.read()
        pairs = rows.reshape(self.n_heads, self.shape[0] // (2 * self.n_heads), 2, *self.shape[1:])  # (H, r/2, 2, in)
        return pairs.swapaxes(1, 2).reshape(self.shape)
