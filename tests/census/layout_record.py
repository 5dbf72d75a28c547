"""The committed comparison with llama.cpp and vLLM, which `layouts` makes."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

RECORD = Path(__file__).with_name("layouts.csv")
HALVES, NEIGHBOURS, NONE = "halves", "neighbours", "none"
HEAD_DIM, CONFIG, OTHER = "1/sqrt(head_dim)", "config", "other"


@dataclass(frozen=True)
class Line:
    """A type in three projects."""

    type: str
    row: str
    rotary: str
    rotary_llama_cpp: str
    rotary_vllm: str
    norm_adds: str
    norm_adds_llama_cpp: str
    norm_adds_vllm: str
    scale: str
    scale_llama_cpp: str
    agree: str = ""


def disagreements(line: Line) -> list[str]:
    """What a row and another project say otherwise: "rotary llama.cpp" ..."""
    pairs = {
        "rotary llama.cpp": (line.rotary, line.rotary_llama_cpp), "rotary vLLM": (line.rotary, line.rotary_vllm),
        "norm llama.cpp": (line.norm_adds, line.norm_adds_llama_cpp),
        "norm vLLM": (line.norm_adds, line.norm_adds_vllm),
        "scale llama.cpp": (line.scale, line.scale_llama_cpp),
    }  # fmt: skip
    undecided = ("", NONE, CONFIG, OTHER)  # a config may say whether a model rotates, and what its scale is
    definite = {what: pair for what, pair in pairs.items() if not {*pair} & {*undecided}}
    return [what for what, (ours, theirs) in definite.items() if ours != theirs]


def write(lines: Sequence[Line], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Line))
        writer.writerows(map(astuple, lines))


def written(path: Path = RECORD) -> list[Line]:
    """The committed lines."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Line(**row) for row in csv.DictReader(file)]
