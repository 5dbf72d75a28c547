"""docs/limits.md has every limit of the code, with its number and message; each attack of tests/attacks can be run."""

import ast
import re
import shlex
import subprocess
import sys
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest

import weightscope

pytestmark = pytest.mark.docs
PACKAGE = Path(weightscope.__file__).parent
ROOT = Path(__file__).parents[2]
LIMITS, ATTACKS = ROOT / "docs" / "limits.md", ROOT / "tests" / "attacks" / "README.md"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LIKE_A_LIMIT = re.compile(r"(MAX|MOST|LARGEST|LONGEST)(_|$)")
# Constants of such names past which nothing is refused: what is computed or shown at a time, and tolerances.
NO_LIMITS = {
    "pairs.identity.wsid.LARGEST_BIAS",  # zeros in a larger one are values as any
    "runner.convert.MAX_BESIDE",  # larger files are not copied along
    "checkpoint.packings.mlx.LARGEST_NVFP4", "pairs.same.figures.MOST_ROLES", "pairs.deeds.views.LARGEST_WHOLE",
    "pairs.deeds.orders.MOST_SHIFTED", "pairs.learned.spaces.MOST_SHARED",
    "adopting.full_size.MOST_SCORES", "adopting.full_size.MOST_WORK",  # beyond them a row is labelled unproved
    "adopting.trial.MOST_CLASSES", "adopting.trial.MOST_PLANS",
    "adopting.draft.MOST_NAMED", "adopting.shapes.MOST_FLAGS",
    "adopting.config_keys.MOST_LAYERS", "adopting.adopt.MOST", "adopting.tiny_models.MOST_PARAMETERS",
    "adopting.full_size.LONGEST", "adopting.full_size.MOST_BEYOND",
    "pairs.same.elsewhere.MOST_UNREAD", "pairs.lineage.neurons.MOST", "pairs.lineage.neurons.MOST_ROWS",  # samples
    "pairs.changes.token_order.MOST_TOKENS", "heads.detok.kernels.MOST_TOKENS", "heads.detok.kernels.MOST_VALUES",
    "pairs.deeds.rounding.LARGEST_HALF",
    "pairs.deeds.recomputed.LARGEST_SVD", "pairs.deeds.recomputed.MOST_STEPS",  # nothing is claimed
    "heads.audit.figures.MOST_CURVES", "checkpoint.opening.MOST_ENTRIES",
    "checkpoint.gguf.LONGEST_LIST", "checkpoint.http.LARGEST_REQUEST", "checkpoint.http.LONGEST_WAIT",
    "checkpoint.storage.LARGEST_READ", "heads.circuits.passes.MOST_PAIRS", "heads.detok.on_text.MOST_DIFFERENCE",
    "report.findings.MOST_OPEN", "model.metrics.auroc.MOST_SCORES", "model.metrics.spectra.MOST_RANK",
    "heads.outliers.figures.MOST_IN_LEGEND", "heads.outliers.figures.MOST_DRAWN", "heads.outliers.figures.MOST_NAMED",
    "report.pages.style.MOST_DESCRIBED", "report.pages.sarif.MOST_PLACED",
    "runner.runner.LARGEST_ERROR", "heads.tensors.findings.LARGEST_RMS", "heads.tensors.matrices.LARGEST_EXACT",
    "model.text.sandbox.MOST_CHILDREN", "pairs.lineage.neurons.LARGEST", "pairs.deeds.views.LARGEST_CODE",
    "pairs.learned.structure.LARGEST", "heads.tensors.findings.MOST_USUAL", "pairs.same.function.MOST",
}  # fmt: skip


class Row(NamedTuple):
    what: str
    limit: str
    why: str
    message: str
    constant: str


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """The cells of a page's table, found by the heading of its first column."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


ROWS = [Row(*cells) for cells in rows_of(LIMITS, "what")]


def number(text: str) -> int:
    """The number that a cell begins with: "16,000,000 bytes", "4 GiB", "2^63 − 1"."""
    if power := re.match(r"2\^(\d+)( − 1)?", text):
        return 2 ** int(power[1]) - (1 if power[2] else 0)
    match = re.match(r"([\d,.]+)( [KMG]iB)?", text)
    assert match, text
    return int(match[1].replace(",", "")) * UNITS.get((match[2] or "").strip(), 1)


def named(constant: str) -> object:
    module, name = constant.strip("`").rsplit(".", 1)
    return getattr(import_module(f"weightscope.{module}"), name)


def test_the_table_has_the_codes_numbers() -> None:
    assert not [row for row in ROWS if named(row.constant) != number(row.limit) or not row.what or not row.why]


def test_messages_are_in_the_code() -> None:
    texts = [node.value for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    spoken = "\n".join(texts)
    for row in ROWS:
        for words in re.findall(r"`([^`]+)`", row.message):
            missing = [part for part in words.split("…") if part.strip() and part not in spoken]
            assert not missing, f"{row.what}: nothing in the code says {missing}"


def test_every_limit_is_in_the_table() -> None:
    """A constant that is called like a limit is one, or is said here to be none."""
    constants = {
        f"{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}.{target.id}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and LIKE_A_LIMIT.match(target.id)
    }
    in_table = {row.constant.strip("`") for row in ROWS}
    assert len(in_table) == len(ROWS)
    assert constants - in_table == NO_LIMITS & constants
    assert constants >= NO_LIMITS and not NO_LIMITS & in_table


def test_what_was_tried_can_be_tried_again() -> None:
    """Each row's command is there, and tries as many things as the row says."""
    for extra in ("gguf", "tokenizers"):
        pytest.importorskip(extra, reason="the fuzzer needs the extras `gguf` and `bigrams`")
    from tests.attacks import changing_files
    from tests.fuzz.run import TARGETS

    files: dict[str, int] = {}
    for tried, how_often, again in rows_of(ATTACKS, "tried"):
        count, words = int(how_often.split()[0].replace(",", "")), shlex.split(again.strip("`"))
        assert words[:2] == ["python", "-m"], tried
        if words[2] == "pytest":
            files[words[-1]] = count
        elif words[2] == "tests.fuzz":
            assert count == int(words[3]) and set(words[5:]) <= set(TARGETS), tried
        else:
            assert words[2] == changing_files.__name__ and count == int(words[3]), tried
    command = [sys.executable, "-m", "pytest", "-m", "", "--collect-only", "-q", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"^(tests/\S+): (\d+)$", collected, re.M)}
    assert counts == files
