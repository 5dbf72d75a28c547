"""The detokenization paper's settings and printed numbers, all of GPT-2's first layer."""

from collections.abc import Iterable

MODELS = ("gpt2", "openai-community/gpt2")
QUERY = 500  # the position i of Figs 3 and 4

HEADS_OF_FIG_2 = (7, 1)

# Table 2, mean AUROC by head, and the same by frequency, to the three decimals of the authors' notes,
# which give the second of four heads.
AUROC = {
    7: 0.876, 11: 0.806, 6: 0.793, 0: 0.732, 4: 0.694, 3: 0.634, 10: 0.615, 2: 0.549, 8: 0.445, 1: 0.404, 9: 0.401,
    5: 0.286,
}  # fmt: skip
AUROC_BY_FREQUENCY = {7: 0.865, 3: 0.846, 4: 0.830, 6: 0.568}


def is_of(model: str) -> bool:
    """Whether this is the paper's model, by its name on the Hub."""
    return model.partition("@")[0] in MODELS


def there(heads: Iterable[int], n_heads: int) -> list[int]:
    """Those of some heads that a layer has, each once."""
    return [head for head in dict.fromkeys(heads) if head < n_heads]
