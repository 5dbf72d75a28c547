"""Planted checkpoints as GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them, and the values they hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.plants.containers import NO_SLIPS, Packed, Slip
from tests.support.plants.families import GROUPS, HEAD_DIM, HEADS, LAYERS, Planted

BLOCK = 32  # values that share a scale
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "phi3": "phi3",
    "gpt2": "gpt2", "gpt_neox": "gptneox", "falcon": "falcon",
}  # fmt: skip
# Keys of config.json, the first that there is, and what a GGUF file calls them after the architecture's name.
KEYS: dict[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.sliding_window": ("sliding_window",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
}
CARRIED = {key for keys in KEYS.values() for key in keys} | {"rope_parameters", "vocab_size"}


def _neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that LlamaModel.permute makes: halves of each head to neighbours."""
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _blocks(rows: np.ndarray, groups: int) -> np.ndarray:
    """All queries, all keys, all values, of rows by group."""
    parts = rows.reshape(groups, HEADS // groups + 2, HEAD_DIM)
    return np.concatenate([parts[:, :-2].reshape(-1), parts[:, -2].reshape(-1), parts[:, -1].reshape(-1)])


def _order(planted: Planted, name: str, n: int) -> np.ndarray | None:
    """Which row of the tensor is each row of the file; None where none moves."""
    rows = np.arange(n)
    if planted.name == "llama" and (".q_proj" in name or ".k_proj" in name):
        return _neighbours(rows, planted.config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"])
    if planted.name in ("gpt_neox", "falcon") and "query_key_value" in name:
        return _blocks(rows, HEADS if planted.name == "gpt_neox" else GROUPS)
    return None


@dataclass(frozen=True, eq=False)
class GgufContainer:
    """A GGUF file whose matrices within layers are in one of ggml's blocks of 32."""

    name: str
    kind: str

    def packs(self, name: str, w: np.ndarray) -> bool:
        """Whether a tensor is packed here."""
        layers = any(part in name for part in (".layers.", ".h."))
        return layers and w.ndim == 2 and min(w.shape) >= BLOCK

    def takes(self, planted: Planted, keys: Mapping[str, Any]) -> bool:
        """Whether llama.cpp has this architecture, and its files a place for these keys of config.json."""
        is_tied = planted.config.get("tie_word_embeddings", True) and not planted.has("head", None)
        tied = {"tie_word_embeddings"} if is_tied else set()
        return planted.name in ARCHITECTURES and {*keys} <= CARRIED | tied

    def write(self, planted: Planted, folder: Path, slips: Mapping[str, Slip] = NO_SLIPS) -> dict[str, np.ndarray]:
        """Write the checkpoint, and give the values that its file holds, by the names it had."""
        import gguf

        folder.mkdir(parents=True, exist_ok=True)
        kind = ARCHITECTURES[planted.name]
        writer = gguf.GGUFWriter(folder / "model.gguf", kind)
        _add_keys(writer, planted, kind)
        names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind), LAYERS)
        values: dict[str, np.ndarray] = {}
        experts: dict[str, list[np.ndarray]] = {}
        for name, w in planted.tensors.items():
            turned = planted.family.turned and w.ndim == 2 and ".h." in name
            added = np.float32(1 if planted.name == "gemma2" and name.endswith("norm.weight") else 0)
            stored = (w.T if turned else w) + added
            order = _order(planted, name, len(stored))
            stored = stored if order is None else stored[order]
            made, read = self._stored(np.ascontiguousarray(stored), self.packs(name, w), slips.get(name, dict))
            back = read if order is None else read[np.argsort(order)]
            values[name] = (back.T if turned else back) - added
            if ".experts." in name:
                experts.setdefault(name.split(".experts.")[0] + ".experts." + name.split(".")[-2], []).append(made)
                continue
            ggml = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert ggml, name
            writer.add_tensor(ggml, made, raw_dtype=self._dtype(name, w))
        for name, stack in experts.items():
            ggml = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
            assert ggml, name
            writer.add_tensor(ggml, np.stack(stack), raw_dtype=gguf.GGMLQuantizationType[self.kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return values

    def _dtype(self, name: str, w: np.ndarray) -> Any:
        import gguf

        return gguf.GGMLQuantizationType[self.kind if self.packs(name, w) else "F32"]

    def _stored(
        self, w: np.ndarray, is_packed: bool, slip: Callable[[Packed], Packed]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the file has, and its values."""
        import gguf

        if not is_packed:
            return w, w
        kind = gguf.GGMLQuantizationType[self.kind]
        made = gguf.quants.quantize(w, kind)  # (out, bytes)
        made = _joined(slip(_apart(made, self.kind)), self.kind).reshape(made.shape)
        return made, gguf.quants.dequantize(made, kind)


def _apart(made: np.ndarray, kind: str) -> Packed:
    """Codes and scales of blocks: two bytes of scale, then 32 codes; of four bits, i and i + 16 in a byte."""
    blocks = made.reshape(len(made), -1, 34 if kind == "Q8_0" else 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    codes = blocks[..., 2:]
    if kind == "Q4_0":
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    return {"codes": codes.reshape(len(made), -1), "scales": scales, "halves": np.array(BLOCK)}


def _joined(packed: Packed, kind: str) -> np.ndarray:
    """The bytes again."""
    scales = packed["scales"].astype(np.float16)[..., None].view(np.uint8)
    codes = packed["codes"].reshape(*packed["scales"].shape, BLOCK)
    if kind == "Q4_0":
        codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return np.concatenate([scales, codes], axis=-1)


def _add_keys(writer: Any, planted: Planted, kind: str) -> None:
    """What a GGUF file says of the model besides its tensors."""
    config = planted.config
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(config.get("hidden_size") or config["n_embd"])
    inner = planted.tensors[planted.stored("down", 0)].size // 64 if planted.has("down", 0) else 96
    writer.add_feed_forward_length(inner)
    writer.add_context_length(64)
    rope = config.get("rope_parameters") or {}
    values: dict[str, Any] = {name: next((config[key] for key in keys if config.get(key) is not None), None)
                              for name, keys in KEYS.items()}  # fmt: skip
    values["rope.freq_base"] = rope.get("rope_theta")
    if rope.get("rope_type") == "linear":
        writer.add_string(f"{kind}.rope.scaling.type", "linear")
        values["rope.scaling.factor"] = rope["factor"]
    if "partial_rotary_factor" in rope:
        values["rope.dimension_count"] = int(HEAD_DIM * rope["partial_rotary_factor"])
    for name, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(f"{kind}.{name}", value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{kind}.{name}", value)
    writer.add_tokenizer_model("llama")
    vocabulary = len(planted.tensors[planted.stored("tokens", None)])
    writer.add_token_list([f"t{i}" for i in range(vocabulary)])
