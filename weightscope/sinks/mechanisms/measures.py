"""What is measured of every head's sink on every input, beside its strength, value and rank: one row a number."""

from typing import NamedTuple

EPSILONS = (0.01, 0.1, 0.5)  # at which a key is asked whether it is an epsilon-sink (Definition 1)


class Measure(NamedTuple):
    """A number of a head and an input.

    Y = A u is what the head writes, |Y| its Frobenius norm, m the number of queries, s the sink, a_s its column of A;
    V is the variance of the tokens (eq. 17), V' that after this head alone has written to them.
    """

    name: str
    symbol: str
    meaning: str


MEASURES = (
    Measure("written", "$|Y|$", "what the head writes, in units of the residual stream"),
    Measure("distance", "$|Y - 1 u_s^⊤|/|Y|$", "how far from its sink's update everywhere (Lemma 3)"),
    Measure("bound", "$√(m) ε max_j |u_j - u_s|/|Y|$", "what Lemma 3 bounds the distance by"),
    Measure("residual", "$|Y - a_s u_s^⊤|/|Y|$", "the part that is not the sink's (eqs 8, 9)"),
    Measure("residual_bound", "$√(m) ε max_j |u_j|/|Y|$", "what bounds that part (eqs 10, 11)"),
    Measure("leading", "$|a_s||u_s|/σ₁(Y)$", "singular value of the sink's part over the largest of Y (eq. 12)"),
    Measure("leading_bound", "$(1 - ε)√(m) |u_s|/σ₁(Y)$", "what it is at least (eq. 12)"),
    Measure("along", "$|cos(v₁(Y), u_s)|$", "of Y's first right singular vector and the sink's update (eq. 12)"),
    Measure("variance_change", "$V'/V - 1$", "how the head's update changes the tokens' variance (Lemma 4)"),
    Measure("variance_sink", "$Var(a_s)|u_s|²/V$", "what uneven attention to the sink adds to it (eq. 18)"),
    Measure("variance_bound", "bound of $|V'/V - 1|$", "by Lemma 4 (eq. 20)"),
    Measure("key_ratio", "$|k_s|$ / mean $|k_j|$", "the sink's key norm over the others' mean (A.2)"),
    Measure("query_similarity", "cosine of queries", "mean over pairs of different queries, before rotation (A.2)"),
    Measure("update_spread", "sd $|o_i|$ / mean $|o_i|$", "of what positions gather, $o = A v$, before $W_O$ (A.2)"),
    Measure("alignment", "$|cos(x_s, v₁(W_QK))|$", "the sink token along the first key direction of $W_QK$ (Lemma 2)"),
    Measure("alignment_others", "$|cos(x_j, v₁(W_QK))|$", "the same of the other tokens, their mean"),
)
