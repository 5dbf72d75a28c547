"""What the list of commands says of each, what it gives and what it costs, and the examples at the end of its help."""

from typing import NamedTuple

import click


class Told(NamedTuple):
    """A line for the list of commands, and command lines as they are typed."""

    gives: str
    examples: tuple[str, ...]


TOLD = {
    "inspect": Told(
        "Family, shapes, bytes an audit would read. Reads headers only.",
        (
            "weightscope inspect embedded",
            "weightscope inspect openai-community/gpt2",
            "weightscope inspect model/ --check",
        ),
    ),
    "audit": Told(
        "Spectra of every head, findings, a page. Reads attention's weights once.",
        (
            "weightscope audit embedded --out audit/",
            "weightscope audit model/ --out audit/ --layers 0-3 --resume",
            "weightscope audit model/ --out audit/ --all --fail-on error --quiet",
        ),
    ),
    "compare": Told(
        "How far every head moved between checkpoints. Reads each once.",
        (
            "weightscope compare base/ tuned/ --out moved/",
            "weightscope compare step-1/ step-2/ step-3/ --out run/",
            "weightscope compare base/ adapter/ --out moved/ --max-change 0.1",
        ),
    ),
    "reference": Told(
        "What is usual, for audit --reference. An audit of every checkpoint.",
        ("weightscope reference checkpoints.txt --out reference.npz",),
    ),
    "circuits": Told(
        "Heads by name and who reads whom. Weights only; --measure runs the model.",
        (
            "weightscope circuits embedded --out circuits/",
            "weightscope circuits model/ --out circuits/ --layers 0-7 --top 50",
            "weightscope circuits model/ --out circuits/ --measure",
        ),
    ),
    "detok": Told(
        "Bigram AUROC of each head of a layer. Every token against every token.",
        (
            "weightscope detok embedded --out detok/",
            "weightscope detok gpt2/ --counts counts.npz --out detok/",
            "weightscope detok gpt2/ --counts counts.npz --out detok/ --sample 2000",
        ),
    ),
    "neighbours": Told(
        "Previous tokens that each head scores highest. One layer's weights.",
        ('weightscope neighbours embedded " ship"', "weightscope neighbours embedded --token-id 11 --head 3 --top 5"),
    ),
    "positions": Told(
        "How heads of layer 0 weigh positions. One layer; --on-text runs the model.",
        (
            "weightscope positions embedded --out positions/",
            "weightscope positions gpt2/ --out positions/ --query 500 --head 7",
        ),
    ),
    "bigrams": Told(
        "Bigram counts of a corpus, for detok. Tokenizes all of it once.",
        ("weightscope bigrams books/ --tokenizer gpt2/ --out counts.npz",),
    ),
    "norms": Told(
        "What attention adds up, by kind of token. Runs the model (PyTorch).",
        (
            "weightscope norms embedded --out norms/",
            "weightscope norms bert/ --text books/ --inputs 100 --out norms/",
        ),
    ),
    "outliers": Told(
        "Dimensions that stand out, and what they add. Runs the model (PyTorch).",
        ("weightscope outliers embedded --out outliers/", "weightscope outliers bert/ --inputs 200 --out outliers/"),
    ),
    "sinks": Told(
        "Attention sinks: a bias, or of what kind. Runs the model (PyTorch).",
        (
            "weightscope sinks embedded --question bias --out sinks/",
            "weightscope sinks vit/ --question kind --images photos/ --out sinks/",
        ),
    ),
    "families": Told(
        "Every architecture that is read, as a table. Reads no weights.",
        ("weightscope families", "weightscope families --csv rows.csv"),
    ),
    "adopt": Told(
        "A proved row for an unknown architecture. Runs tiny models (PyTorch).",
        ("weightscope adopt model/", "weightscope adopt model/ --save"),
    ),
    "completion": Told(
        "The script by which a shell completes commands. Reads nothing.",
        (
            "weightscope completion bash >> ~/.bashrc",
            "weightscope completion zsh >> ~/.zshrc",
            "weightscope completion fish > ~/.config/fish/completions/weightscope.fish",
        ),
    ),
}  # fmt: skip


def with_examples(command: click.Command) -> click.Command:
    """A command that says in the list what it gives and costs, and ends its help with examples."""
    command.short_help, examples = TOLD[str(command.name)]
    command.epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])
    return command
