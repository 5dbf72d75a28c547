"""What the norm-based-attention paper prints of BERT-base (uncased), for comparison.

Kobayashi, Kuribayashi, Yokoi, Suzuki and Inui, ベクトル長に基づく自己注意機構の解析 (an analysis of self-attention by
lengths of vectors): Tables 1 to 3, and Fig. 2 in the words of section 5.2. It ran 992 sequences of at most 128 tokens,
two consecutive paragraphs of the English Wikipedia each. The paper counts layers and heads from 1; here they count
from 0.
"""

from weightscope.model import Model

MODELS = ("bert-base-uncased", "google-bert/bert-base-uncased")

Moments = tuple[float, float, float, float, float]  # mean, standard deviation, coefficient of variation, max, min

# Table 1: |f(x)| of the heads that vary most and least, and of all; (layer, head), counted from 0.
F_OF_HEADS: dict[tuple[int, int], Moments] = {
    (1, 3): (4.26, 1.59, 0.37, 12.66, 0.96),
    (1, 6): (3.40, 0.50, 0.12, 6.15, 1.35),
}
F_OF_ALL: Moments = (5.15, 1.75, 0.34, 18.64, 0.10)

# Table 2: |x| of the layers that vary most and least, and of all.
X_OF_LAYERS: dict[int, Moments] = {11: (20.49, 4.62, 0.23, 32.84, 4.13), 6: (21.64, 1.40, 0.06, 23.03, 11.87)}
X_OF_ALL: Moments = (19.93, 3.03, 0.15, 32.84, 4.13)

# Table 3: pairs (i, j) and Spearman's rank correlation of alpha and |f(x)| by the kind of j.
SPEARMAN: dict[str, tuple[int, float]] = {
    "[CLS]": (17_443_296, -0.34),
    "[SEP]": (34_886_592, -0.69),
    ". or ,": (182_838_528, -0.25),
    "other": (1_944_928_224, -0.06),
}

LEAST_STRETCH = 1.8  # Fig. 2: the largest singular value of f over its smallest is at least this in every head drawn


def is_paper_model(model: Model) -> bool:
    """Whether this is the checkpoint that the paper analysed, by its name."""
    return model.name.partition("@")[0] in MODELS
