"""Is this still the same model? Every tensor, the config and the tokenizer of two checkpoints."""

SIGNS = {"same.json": "same"}  # command, by a file

# The verdicts, from strong to weak, and what the weakest that passes is called.
SAME_BYTES, SAME_VALUES, ROUNDED, QUANTISED = "same bytes", "same values", "rounded", "quantised"
SAME_FUNCTION, UNDECIDED, DIFFERENT = "same function", "undecided", "different"
VERDICTS = (SAME_BYTES, SAME_VALUES, ROUNDED, QUANTISED, SAME_FUNCTION, UNDECIDED, DIFFERENT)
UP_TO = {
    "values": SAME_VALUES,
    "rounding": ROUNDED,
    "rounded": ROUNDED,
    "quantisation": QUANTISED,
    "quantised": QUANTISED,
    "function": SAME_FUNCTION,
}
