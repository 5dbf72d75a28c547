"""What the norm-based-attention paper prints of BERT-base (uncased), for comparison.

Kobayashi, Kuribayashi, Yokoi, Suzuki and Inui, ベクトル長に基づく自己注意機構の解析 (an analysis of self-attention by
lengths of vectors): Tables 1 to 3, and Fig. 2 in the words of section 5.2. It ran 992 sequences of at most 128 tokens,
two consecutive paragraphs of the English Wikipedia each. The paper counts layers and heads from 1, this file from 0.

Every table is keyed as its rows are in `NormAnalysis`, and gives their moments: mean, sd, cv, max, min.
"""

MODELS = ("bert-base-uncased", "google-bert/bert-base-uncased")

TABLE_1 = {  # |f(x)| of the heads that vary most and least, by layer and head
    (1, 3): (4.26, 1.59, 0.37, 12.66, 0.96),
    (1, 6): (3.40, 0.50, 0.12, 6.15, 1.35),
}
TABLE_2 = {  # |x| of the layers that vary most and least
    (11,): (20.49, 4.62, 0.23, 32.84, 4.13),
    (6,): (21.64, 1.40, 0.06, 23.03, 11.87),
}
LAST_ROWS = {  # of both
    ("|f(x)|, all heads together",): (5.15, 1.75, 0.34, 18.64, 0.10),
    ("|x|, all layers together",): (19.93, 3.03, 0.15, 32.84, 4.13),
}
TABLE_3 = {  # pairs (i, j), and Spearman's rank correlation of alpha and |f(x)|, by the kind of j
    ("[CLS]",): (17_443_296, -0.34),
    ("[SEP]",): (34_886_592, -0.69),
    (". or ,",): (182_838_528, -0.25),
    ("other",): (1_944_928_224, -0.06),
}

LEAST_STRETCH = 1.8  # Fig. 2: the largest singular value of f over its smallest is at least this in every head drawn
