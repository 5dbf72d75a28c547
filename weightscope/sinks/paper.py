"""Numbers printed in the sink-as-bias paper: Table 1, changes in perplexity on OpenWebText."""

from weightscope.sinks.patching import ABLATED, PATCHED

RANGES = tuple((layers, how) for layers in ("early", "middle", "late", "all") for how in (PATCHED, ABLATED))
HEADER = ("model", "from", "biases", "perplexity", *(f"{layers} {how}" for layers, how in RANGES))
TABLE_1 = (
    ("mistralai/Mistral-7B-v0.1", "the paper", "no", 6.94, 0.06, 1.19, 0.00, 0.56, 0.00, 0.22, 0.16, 2.38),
    ("meta-llama/Llama-2-7b-hf", "the paper", "no", 7.00, 0.28, 0.75, 0.00, 0.22, 0.06, 0.06, 0.28, 1.75),
    ("Qwen/Qwen3-8B-Base", "the paper", "no", 10.44, 6.19, 4.75, 0.00, 0.63, 0.00, 2.13, 7.31, 4.94),
    ("Qwen/Qwen2.5-7B", "the paper", "yes", 11.25, 1.69, 1.13, 0.19, 0.56, 1.31, 1.31, 2.31, 1.31),
    ("EleutherAI/pythia-6.9b", "the paper", "yes", 11.81, 10.56, 12.44, 1.38, 93.19, 0.19, 0.38, 6.81, 58.19),
)
