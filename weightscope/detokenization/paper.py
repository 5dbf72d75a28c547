"""The detokenization paper's settings and printed numbers, all of GPT-2's first layer."""

from collections.abc import Iterable

MODELS = ("gpt2", "openai-community/gpt2")
QUERY = 500  # the position i of Figs 3 and 4
TOP = 10  # ranks in Tables 1 and 3

# Current tokens of Tables 1 and 3; the first two have ROC curves in Fig. 2.
TOKENS = (
    "iens", " Jackson", "tarian", "yo", "ation", " Korea", " Obama", " Einstein", " chloride", " century",
)  # fmt: skip
HEADS_OF_TABLES = (1, 3, 4, 5, 7, 10)
HEADS_OF_FIG_2 = (7, 1)
HEAD_OF_FIG_3 = 7  # and of Fig. 4

# Table 2: mean AUROC by head.
AUROC = {7: 0.88, 11: 0.81, 6: 0.79, 0: 0.73, 4: 0.69, 3: 0.63, 10: 0.62, 2: 0.55, 8: 0.44, 1: 0.40, 9: 0.40, 5: 0.29}


def is_of(model: str) -> bool:
    """Whether this is the paper's model, by its name on the Hub."""
    return model.partition("@")[0] in MODELS


def there(heads: Iterable[int], n_heads: int) -> list[int]:
    """Those of some heads that a layer has, each once."""
    return [head for head in dict.fromkeys(heads) if head < n_heads]
