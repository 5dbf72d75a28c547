"""The effect of a key of config.json: it decides the computation, or nothing, or is unknown.

`config_defaults.json` says which keys the code of transformers' class for a model_type takes and
reads. A key that this code reads counts, whatever it is called; one that it takes and never reads
decides nothing; one that it does not know may be for another reader.
"""

import json
import re
from collections.abc import Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from weightscope.checkpoint.config import read_json

FILE = Path(__file__).with_name("config_defaults.json")
# Keys of a file's writer, storage, initial values, regularisation, outputs, generation and
# labels. No trained model computes anything else for them; a key that the model's row reads counts
# all the same.
NO_EFFECT = re.compile(
    r"transformers_version|_?(model_)?name_or_path|_commit_hash|(torch_)?dtype|architectures"
    r"|use_bfloat16|(quantization|compression|generation)(_config)?(\..*)?"
    r"|_?(attn|experts)_implementation(_internal)?|attn_implementation|use_kernels?|kernel_config"
    r"|verbose|.*dropout(_p|_prob|_rate)?|.*_p?drop|.*layerdrop|drop_path_rate"
    r"|stochastic_depth_prob|gradient_checkpointing"
    r"|initializer_\w+|init_(range|std|scale|factor|method|config)"
    r"|.*_initializer_(range|factor|std)|_?init_\w+|\w+_init_values?|layerscale_value"
    r"|(use_)?cache|use_cache|return_dict|torchscript|tf_legacy_loss"
    r"|output_(attentions|hidden_states|router_logits)"
    r"|output_scores|return_dict_in_generate|chunk_size_feed_forward|keys_to_ignore_at_inference"
    r"|(id2label|label2id)(\..*)?|num_labels|problem_type|finetuning_task"
    r"|task_specific_params(\..*)?|tokenizer_class"
    r"|prefix|seq_aux|(router_)?(aux|z)_loss_(alpha|coef|weight|coefficient)|router_jitter_noise"
    r"|.*_loss_(coef|weight)|.*_loss_coefficient|repad_logits_with_grad|apply_spec_augment"
    r"|mask_(time|feature)_\w+|ctc_\w+"
    r"|(bos|eos|pad|sep|cls|mask|unk|eod|decoder_start|forced_bos|forced_eos)_token_id"
    r"|forced_decoder_ids|(begin_)?suppress_tokens|bad_words_ids|max_length|min_length|do_sample"
    r"|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|top_p"
    r"|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size"
    r"|encoder_no_repeat_ngram_size|num_return_sequences|remove_invalid_values"
    r"|\w*ignore_index|exponential_decay_length_penalty|max_new_tokens|begin_suppress_tokens"
    r"|transformers_weights",
    re.ASCII,
)
# Tokens that the code of some classes looks for, such as Longformer's, which counts positions by
# its padding: without effect only where the class or a row says so.
TOKEN = re.compile(r"(bos|eos|pad|sep|cls|mask)_token_id", re.ASCII)
# Packing of weights, read with them.
STORAGE = {"quantization", "quantization_config", "compression_config"}
EFFECTS = COMPUTATION, UNKNOWN, NONE = "computation", "unknown", "none"
# Keys that decide the computation, read by attention's row or not.
KNOWN = re.compile(
    r".*(multiplier|scal(e|ing)|softcap|logit_scale|window|rope|rotary|eps"
    r"|hidden_act|activation|experts_per_tok|top_?k|layer_types|bias|norm"
    r"|tie_word_embeddings|num_\w|\w_size|\w_dim|causal).*"
    r"|auto_map(\..*)?|model_type|query_pre_attn_scalar|relative_attention_\w+|(scale_)?attn_\w+"
    r"|(original_)?max_position_embeddings|is_decoder|add_cross_attention",
    re.ASCII,
)

DEEPEST = 8  # words of a dotted key that are looked at together

# Classes that put a head for some task on a model; keys that only they read decide nothing without
# them.
HEAD = re.compile(
    r".*(For(Sequence|Token|Audio|AudioFrame|Image|Video)Classification(WithTeacher)?"
    r"|ForQuestionAnswering|ForMultipleChoice|ForXVector|ForMaskedImageModeling"
    r"|ForNextSentencePrediction|Summary|DoubleHeadsModel|ClassificationHead)",
    re.ASCII,
)
# Keys that every class of transformers 4 took; few classes' code reads them.
OF_ALL = {
    "is_decoder",
    "is_encoder_decoder",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "tie_encoder_decoder",
    "pruned_heads",
}


class Reader(NamedTuple):
    """The class that reads a section of a config."""

    kind: str = ""  # model_type; empty where none is said
    has_head: bool = False  # the model has a head for some task
    may_turn: bool = True  # a row says that it rotates, or no row knows it

    @property
    def is_known(self) -> bool:
        """True if the class is one of transformers'."""
        return self.kind in _kinds()

    def effect(self, key: str) -> str | None:
        """The effect of a key of the section in its code; None where the class is not known."""
        if not self.is_known:
            return None
        if self._is("read", key):
            return COMPUTATION
        if self._is("heads", key):
            return UNKNOWN if self.has_head else NONE
        if self._is("unread", key) or NO_EFFECT.fullmatch(key):
            return NONE
        if self.takes(key):
            return COMPUTATION if KNOWN.fullmatch(key) else UNKNOWN
        return NONE if key in OF_ALL else UNKNOWN

    def takes(self, key: str) -> bool:
        """True if it knows such a key, or is not known itself."""
        if not self.is_known or key == "auto_map":
            return True
        return any(self._is(title, key) for title in ("values", "derived", "unset"))

    def _is(self, title: str, key: str) -> bool:
        return self.kind in tables()[title].get(key, ())


def effect_of(key: str, read: frozenset[str], readers: Mapping[str, Reader]) -> str:
    """The known effect of a key on what a trained model computes.

    read: Words of the row that reads it; readers: by the place of a section in the config.
    """
    words = key.split(".")
    if not STORAGE.isdisjoint(words):
        return NONE
    reader = readers.get(".".join(words[:-1]), Reader())
    if words[-1] in read and (reader.takes(words[-1]) or NO_EFFECT.fullmatch(words[-1])):
        return COMPUTATION
    effect = reader.effect(words[-1])
    if effect is not None:
        return effect
    if not read and TOKEN.fullmatch(words[-1]):
        return UNKNOWN
    ends = (".".join(words[i:]) for i in range(len(words))[-DEEPEST:])
    if any(NO_EFFECT.fullmatch(end) for end in ends):
        return NONE
    if "rope_parameters" in words:
        place = ".".join(words[: words.index("rope_parameters")])
        return COMPUTATION if place not in readers or readers[place].may_turn else UNKNOWN
    return COMPUTATION if KNOWN.fullmatch(words[-1]) else UNKNOWN


def word_sets(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table, nested or not, with its lists of words as sets."""
    return {
        key: frozenset(entry.split()) if isinstance(entry, str) else word_sets(entry)
        for key, entry in table.items()
    }


def values_by_type(table: Mapping[str, Mapping[str, Set[str]]], kind: str) -> dict[str, Any]:
    """Values of a model_type in a table of key -> value as JSON -> model_types."""
    return {
        key: json.loads(text)
        for key, texts in table.items()
        for text, kinds in texts.items()
        if kind in kinds
    }


@lru_cache(None)
def tables() -> dict[str, dict[str, Any]]:
    """The tables of the file, with model_types as sets; `usual` has them by value."""
    table = read_json(FILE)
    sets = word_sets({title: entry for title, entry in table.items() if title != "names"})
    usual = sets["values"]
    values = {key: frozenset().union(*texts.values()) for key, texts in usual.items()}
    return {**sets, "names": table["names"], "usual": usual, "values": values}


@lru_cache(None)
def _kinds() -> frozenset[str]:
    """The model_types whose classes are known."""
    return frozenset().union(*tables()["values"].values())
