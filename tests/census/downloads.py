"""What share of a table of downloads weightscope reads: architectures joined with the census by transformers' classes.

    python -m tests.census.downloads DOWNLOADS.csv

reads columns `architecture` and `downloads`, writes downloads.csv next to this file (shares, and the model_type of each
architecture), and prints the section of docs/architectures.md that `section` makes of it.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightscope.model.rows.table import PUBLISHED, lines

SHARES = Path(__file__).with_name("downloads.csv")
MOST_DOWNLOADED = 45
MOST_NAMED = 6  # architectures of one reason that are named
# model_types of architectures that transformers has no class for: those of their repositories' config.json.
OF_REPOSITORIES = {
    "Phi3VForCausalLM": "phi3_v", "H2OVLChatModel": "h2ovl_chat", "HfMoondream": "moondream1",
    "DotsOCRForCausalLM": "dots_ocr", "DeciLMForCausalLM": "nemotron-nas", "LLaDAModelLM": "llada",
    "LlavaLlamaForCausalLM": "llava_llama", "LlavaQwenForCausalLM": "llava_qwen",
    "LlavaMistralForCausalLM": "llava_mistral", "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "QWenLMHeadModel": "qwen", "MiMoForCausalLM": "mimo", "T5WithLMHeadModel": "t5", "MiniCPMForCausalLM": "minicpm",
    "LLaDA2MoeModelLM": "llada2_moe", "BailingMoeV2ForCausalLM": "bailing_moe_v2", "Step3p5ForCausalLM": "step3p5",
    "InternLM3ForCausalLM": "internlm3", "ExaoneForCausalLM": "exaone", "ExaoneMoEForCausalLM": "exaone_moe",
    "SarvamMoEForCausalLM": "sarvam_moe", "SarvamMLAForCausalLM": "sarvam_mla", "GritLM": "mistral",
    "MoshiForConditionalGeneration": "moshi",
}  # fmt: skip
WITHOUT_IMAGES = ("dots_ocr", "llava_qwen")  # the tiny models lack the image's tower

SECTION = """\
Known for one table: text models that TransformerLens does not read (its scan of 25 June 2026, models with 500 downloads
or more; {count} architectures). That is not what people download. An architecture is joined with the census by
transformers' class, one of remote code by the model_type of its repositories (HfMoondream as Moondream 2; Moondream 3
has the same class and is not read). It counts if all its stacks do (of DotsOCR and LLaVA on Qwen, the text's alone was
compared).

| by downloads | exact against transformers' code | or as tiny models written by hand | every tensor named |
| --- | --- | --- | --- |
| all {count} architectures | {exact:.0%} | {read:.0%} | {named:.0%} |
| the {most} most downloaded | {top_exact:.0%} | {top_read:.0%} | {top_named:.0%} |

The second share includes architectures of remote code, that transformers has no class for. Their rows agree with tiny
models that were written by hand after what vLLM, SGLang and llama.cpp publish of them
([published.csv](../weightscope/model/rows/published.csv), `python -m tests.census.published`); the code in their
repositories was not run. Whatever opens them says so. `python -m tests.census.downloads DOWNLOADS.csv` counts again.

| not exact | downloads | architectures |
| --- | --- | --- |
{refused}

| tensors without a role | downloads | architectures |
| --- | --- | --- |
{unnamed}"""


class Line(NamedTuple):
    """An architecture of the table, and what is known of its model_type."""

    architecture: str
    share: float
    type: str
    reason: str  # why it is not read exactly; empty if it is
    described: bool  # compared with a tiny model written by hand alone
    unnamed: str  # modules whose tensors have no role; empty if all have one


def types_of_classes() -> dict[str, str]:
    """The model_type of every public class of transformers."""
    from transformers.models.auto import modeling_auto

    types: dict[str, str] = {}
    for name, mapping in vars(modeling_auto).items():
        for kind, classes in mapping.items() if name.endswith("_MAPPING_NAMES") else ():
            for each in [classes] if isinstance(classes, str) else classes:
                types.setdefault(each, kind)
    return types


def count(table: Path) -> list[tuple[str, float, str]]:
    """Architectures of a table of downloads, with their shares in percent and model_types."""
    with table.open(encoding="utf-8", newline="") as file:
        downloads = {line["architecture"]: int(line["downloads"]) for line in csv.DictReader(file)}
    total, known = sum(downloads.values()), types_of_classes() | OF_REPOSITORIES
    order = sorted(downloads, key=lambda name: -downloads[name])
    return [(name, round(100 * downloads[name] / total, 3), known.get(name, "")) for name in order]


def write(shares: Sequence[tuple[str, float, str]]) -> None:
    """Write the shares, the most downloaded first."""
    with SHARES.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([("architecture", "percent", "type"), *shares])


def judged(rows: Sequence[Mapping[str, str]]) -> list[Line]:
    """Every architecture of the committed shares, by the census' rows and by published descriptions."""
    from tests.census.record import mechanism

    described = {line["type"] for line in lines(PUBLISHED)}
    by_type: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in [*rows, *lines(PUBLISHED)]:
        by_type[row["type"]].append(row)
    judged = []
    with SHARES.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            kind = line["type"]
            of_type = by_type.get(kind, [])
            bad = next((row for row in of_type if row["verdict"] != "exact"), None)
            reason = "no row yet" if not of_type else mechanism(bad["reason"]) if bad else ""
            unnamed = next((row["where"] or "all" for row in of_type if row["unnamed"] != "0"), "")
            if not any(int(row["tensors"]) for row in of_type):
                unnamed = "all, or never counted"
            if kind in WITHOUT_IMAGES:
                unnamed = "elsewhere: the image's tower, never counted"
            is_described = kind in described and not reason
            judged.append(Line(line["architecture"], float(line["percent"]) / 100, kind, reason, is_described, unnamed))
    return judged


def section(rows: Sequence[Mapping[str, str]]) -> str:
    """The section of docs/architectures.md."""
    every = judged(rows)
    shares = {}
    for start, lines_of in (("", every), ("top_", every[:MOST_DOWNLOADED])):
        whole = sum(line.share for line in lines_of) if start else 1
        shares[f"{start}exact"] = sum(line.share for line in lines_of if not line.reason and not line.described) / whole
        shares[f"{start}read"] = sum(line.share for line in lines_of if not line.reason) / whole
        shares[f"{start}named"] = sum(line.share for line in lines_of if not line.unnamed) / whole
    return SECTION.format(
        count=len(every), most=MOST_DOWNLOADED, **shares,
        refused=table(every, "reason"), unnamed=table(every, "unnamed"),
    )  # fmt: skip


def table(every: Sequence[Line], column: str) -> str:
    """Architectures by a reason, the most downloaded first."""
    by_reason: dict[str, list[Line]] = defaultdict(list)
    for line in every:
        if reason := getattr(line, column):
            by_reason[reason].append(line)
    order = sorted(by_reason, key=lambda reason: -sum(line.share for line in by_reason[reason]))
    return "\n".join(f"| {reason.replace('|', '/')} | {shown(by_reason[reason])} |" for reason in order)


def shown(of_reason: Sequence[Line]) -> str:
    """The share and the names of architectures, as two cells."""
    names = ", ".join(line.architecture for line in of_reason[:MOST_NAMED])
    left = len(of_reason) - MOST_NAMED
    return f"{sum(line.share for line in of_reason):.1%} | {names}{f' and {left} more' if left > 0 else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.census.downloads", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("table", type=Path, help="a CSV file with columns architecture and downloads")
    from weightscope.model.rows.table import RECORD

    write(count(parser.parse_args(argv).table))
    print(section([*lines(RECORD)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
