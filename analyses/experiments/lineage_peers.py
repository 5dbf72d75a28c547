"""Ask modelDNA and Cisco's Provenance Kit about the planted lineages of `analyses.experiments.planted_lineage`.

    pip install modeldna structlog pydantic-settings tiktoken
    pip install --no-deps --ignore-requires-python cisco-ai-provenance-kit   # asks for Python 3.12, runs on 3.11
    HF_HUB_OFFLINE=1 python -m analyses.experiments.lineage_peers --out out/lineage-peers

Both compare one pair of folders at a time, so each suspect is compared with the base that it descends from, a merge
with its first; of a merge modelDNA is also asked the shares of its bases. They are asked as they come: modelDNA reads
whole tensors, the kit nothing from its cache. A suspect gets the base's tokenizer, as a derived checkpoint would. What
a tool cannot read counts as undecided; its error is in the table.

The kit confirms a match by config alone where it can, so its score from weights is judged, too, by its own thresholds.
OUT/peers.csv has a row for each pair, OUT/peers-by-kind.csv the counts, next to `ws.lineage`'s.
"""

import logging
import re
import shutil
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

import weightscope as ws
from analyses.experiments.planted_lineage import families_in, planted, strangers, work_option
from analyses.study import Row, auroc, judge_each, rows_in, study, write
from tests.support.plants.plant import Made, Plant
from weightscope.core.files import Folder
from weightscope.core.tables import Table

OURS = "weightscope"
TOOLS = ("modeldna", "kit", "kit_weights")
HEADER = ("name", "group", "planted", "base", *(f"{tool}_{what}" for tool in TOOLS for what in ("verdict", "score")),
          "modeldna_said", "kit_said", "modeldna_share_error", "modeldna_seconds", "kit_seconds")  # fmt: skip
UNDECIDED = ("SAME_FAMILY_UNRESOLVED", "INSUFFICIENT", "Weak Match", "Insufficient data")
UNRELATED = ("NO_MATCH", "Not Matched")


def verdict_of(label: str) -> str:
    """A tool's answer in the words of `lineage`."""
    label = label.removesuffix(" (metadata only)")
    if label in UNRELATED:
        return "unrelated"
    return "undecided" if label in UNDECIDED or label.startswith("error") else "derived"


def modeldna(suspect: str, base: str) -> dict[str, Any]:
    """modelDNA's verdict and probability."""
    from modeldna.scan import compare_pair

    inference = compare_pair(suspect, base, mode="full")[3]
    label = inference.verdict.value
    return {"modeldna_said": label, "modeldna_verdict": verdict_of(label), "modeldna_score": inference.probability}


def modeldna_share_error(suspect: str, shares: dict[str, float]) -> float:
    """How far the shares that modelDNA finds in a merge are from the planted ones at most."""
    from modeldna.merge import decompose_targets

    alphas = decompose_targets(suspect, list(shares), mode="full").alphas
    return max(abs(alphas[base] - share) for base, share in shares.items())


@cache
def _scanner() -> Any:
    import structlog
    from provenancekit.core.scanner import ModelProvenanceScanner
    from provenancekit.services.cache import NullCache

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return ModelProvenanceScanner(cache=NullCache())


def kit(suspect: str, base: str) -> dict[str, Any]:
    """The kit's decision and score, and what its score from weights alone would decide."""
    from provenancekit.core.scoring import interpret_score

    scores = _scanner().compare(suspect, base).scores
    return {
        "kit_said": scores.provenance_decision, "kit_verdict": verdict_of(scores.provenance_decision),
        "kit_score": scores.pipeline_score, "kit_weights_score": scores.identity_score,
        "kit_weights_verdict": verdict_of(interpret_score(scores.identity_score).label),
    }  # fmt: skip


def ask(plant: Plant, made: Made) -> Row:
    """What both tools say of a pair: a row of HEADER."""
    base = str(Path(plant.expects["base"] or plant.expects["bases"][0]).resolve())
    row: Row = dict.fromkeys(HEADER) | plant.cells | {"base": Path(base).name}
    suspect = Path(made.suspect)
    folder = suspect if suspect.is_dir() else suspect.parent
    if not (folder / "tokenizer.json").exists():
        shutil.copy(Path(base) / "tokenizer.json", folder)
    for name, tool in (("modeldna", modeldna), ("kit", kit)):
        began = time.perf_counter()
        try:
            row |= tool(str(folder.resolve()), base)
        except Exception as error:  # whatever a tool raises is its answer
            text = (str(error).splitlines() or [""])[0].replace(str(folder.resolve()), "the suspect")
            failed = f"error: {type(error).__name__}: {text[:100]}"
            row |= {f"{name}_said": failed, f"{name}_verdict": "undecided"}
            row |= {"kit_weights_verdict": "undecided"} if name == "kit" else {}
        row[f"{name}_seconds"] = round(time.perf_counter() - began, 2)
    if shares := plant.expects["shares"]:
        row["modeldna_share_error"] = modeldna_share_error(str(folder), shares)
    return row


def by_kind(rows: Sequence[dict[str, Any]], ours: dict[str, str]) -> Table:
    """How many of each kind, and of each group of strangers, every tool calls derived, undecided and unrelated."""
    tools = ("weightscope", *TOOLS) if ours else TOOLS
    said = [f"{tool}_{verdict}" for tool in tools for verdict in ("derived", "undecided", "unrelated")]
    lines = []
    for what in (*dict.fromkeys(_line(row) for row in rows), "all derived", "all strangers"):
        matching = [row for row in rows if what in (_line(row), "all strangers" if row["group"] else "all derived")]
        verdicts = {tool: [ours.get(row["name"]) if tool == OURS else row[f"{tool}_verdict"] for row in matching]
                    for tool in tools}  # fmt: skip
        counts = (verdicts[tool].count(verdict) for tool in tools for verdict in ("derived", "undecided", "unrelated"))
        lines.append((what, len(matching), *counts))
    return Table.of_rows(("what", "pairs", *said), lines)


def _line(row: dict[str, Any]) -> str:
    kinds = [kind for kind in row["planted"].split("; ") if kind]
    return row["group"] or ("two kinds" if len(kinds) > 1 else kinds[0] if kinds else "neurons permuted")


def separation(rows: Sequence[dict[str, Any]], tool: str) -> float:
    """AUROC of a tool's score; no score counts as the lowest."""
    given = [row[f"{tool}_score"] for row in rows]
    scores = np.array([-1.0 if score is None or np.isnan(score) else score for score in given])
    return auroc(scores, np.array([not row["group"] for row in rows]))


def our_verdicts(folder: Path) -> dict[str, str]:
    """Verdicts of `ws.lineage` by the name of the pair, if they are there."""
    paths = [folder / name for name in ("planted.csv", "strangers.csv")]
    return {row["name"]: row["verdict"] for path in paths if path.exists() for row in rows_in(path)}


@study("lineage-peers")
@click.option("--most", default=40, show_default=True, help="Strangers of one group that are asked about.")
@click.option("--only", default="", help="Ask about pairs whose names this regular expression matches.")
@click.option("--ours", type=click.Path(path_type=Path), default="figures/planted-lineage", show_default=True,
              help="Folder with the planted.csv and strangers.csv of planted_lineage.")  # fmt: skip
@work_option
def main(files: Folder, most: int, only: str, ours: Path, work: Path) -> None:
    """Ask modelDNA and Cisco's Provenance Kit about the planted lineages of the tiny families."""
    trained = work / "trained"
    if not families_in(trained):
        raise ws.CheckpointError("nothing was trained yet: python -m analyses.toys.train_lineage", file=trained)
    groups: dict[str, list[Plant]] = {}
    for plant in (*planted(trained, (), (), None), *strangers(trained, (), ())):
        if re.search(only, plant.name):
            groups.setdefault(plant.cells["group"], []).append(plant)
    plants = []
    for group, members in groups.items():
        plants += members[:: -(-len(members) // most)] if group else members
    rows = judge_each(plants, ask, "peers", kept=work / "judged")
    write(files, "peers", HEADER, rows)
    table = by_kind(rows, our_verdicts(ours))
    files.table("peers-by-kind.csv", table)
    click.echo(table.text())
    for tool in TOOLS:
        click.echo(f"AUROC of {tool}: {separation(rows, tool):.4g}")


if __name__ == "__main__":
    main()
