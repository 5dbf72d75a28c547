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

# Table 2, mean AUROC by head, and the same by frequency, to the three decimals of the authors' notes,
# which give the second of four heads.
AUROC = {
    7: 0.876, 11: 0.806, 6: 0.793, 0: 0.732, 4: 0.694, 3: 0.634, 10: 0.615, 2: 0.549, 8: 0.445, 1: 0.404, 9: 0.401,
    5: 0.286,
}  # fmt: skip
AUROC_BY_FREQUENCY = {7: 0.865, 3: 0.846, 4: 0.830, 6: 0.568}

# Tables 1 and 3: of a table, a head and a current token, the previous tokens that are printed, with their ranks.
RANKS = (
    (1, 4, "iens", {" sap": 1, " Sap": 3}),
    (1, 7, "iens", {" sap": 1, "Al": 2, " al": 5}),
    (1, 7, " Jackson", {" Peter": 1, " Jesse": 2, " Michael": 3}),
    (3, 4, "tarian", {"Liber": 1, " Liber": 2}),
    (3, 3, "yo", {"Tok": 1, " Tok": 2}),
    (3, 4, "yo", {"Tok": 6}),
    (3, 7, "yo", {"Tok": 1}),
    (3, 4, "ation", {"anim": 1, " Represent": 3}),
    (3, 7, "ation", {" dict": 1, " Fabric": 3, " coron": 5, "valid": 7, "Gener": 8}),
    (3, 4, " Korea", {" North": 1}),
    (3, 7, " Korea", {" North": 1, "North": 2, " South": 3, "South": 4}),
    (3, 1, " Obama", {" Barack": 3, "President": 8}),
    (3, 4, " Obama", {" Barack": 3}),
    (3, 5, " Obama", {" Barack": 5}),
    (3, 7, " Obama", {" President": 2, " Michelle": 3}),
    (3, 7, " Einstein", {" Albert": 1, "Albert": 2}),
    (3, 7, " Jackson", {" Michael": 1, " Peter": 2, "Michael": 3, " Jesse": 4, "Peter": 5, " Janet": 6}),
    (3, 7, " chloride", {" aluminum": 1, " copper": 3, " vinyl": 6, " sodium": 7, " platinum": 8}),
    (3, 10, " chloride", {" potassium": 2, " sodium": 3}),
    (3, 3, " century", {" 19": 1, " nineteenth": 7}),
    (3, 7, " century", {" 21": 1, " twentieth": 6}),
)
CONTRADICTION = (
    "The paper's two tables contradict each other for head 7 and ' Jackson': Table 1 has ' Peter', ' Jesse' and "
    "' Michael' first, Table 3 ' Michael', ' Peter', 'Michael' and ' Jesse'; the authors' notes have Table 3's order."
)


def is_of(model: str) -> bool:
    """Whether this is the paper's model, by its name on the Hub."""
    return model.partition("@")[0] in MODELS


def there(heads: Iterable[int], n_heads: int) -> list[int]:
    """Those of some heads that a layer has, each once."""
    return [head for head in dict.fromkeys(heads) if head < n_heads]
