"""The detokenization paper's settings and printed numbers, all of GPT-2's first layer."""

MODELS = ("gpt2", "openai-community/gpt2")
TOKENS = ("iens", " Jackson", "tarian", " Obama", " Korea", " chloride")  # current tokens of Tables 1 and 3
QUERY = 500  # the position i of Figs 3 and 4

# Table 2: mean AUROC by head.
AUROC = {7: 0.88, 11: 0.81, 6: 0.79, 0: 0.73, 4: 0.69, 3: 0.63, 10: 0.62, 2: 0.55, 8: 0.44, 1: 0.40, 9: 0.40, 5: 0.29}
