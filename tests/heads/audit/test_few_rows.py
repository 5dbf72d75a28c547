"""Embeddings with hardly a finite row: a finding says so, and the rest of the audit is complete."""

import json
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tests.support.commands import is_one_line, run
from tests.support.figures import undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("finite", [0, 1, 2, 9])
@pytest.mark.parametrize("tensor", ["wte.weight", "wpe.weight"])
def test_an_audit_is_whole_but_for_the_rows_that_are_not(tensor: str, finite: int, tmp_path: Path) -> None:
    weights = gpt2_weights()
    broken = len(weights[tensor]) - finite
    weights[tensor][finite:] = np.nan
    source = write_checkpoint(tmp_path / "source", weights)
    with undrawn():
        result = run("audit", source, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    assert "nan" not in result.stdout and not result.stderr  # as numbers are printed; findings say NaN
    read = {
        name: json.loads((tmp_path / "out" / name).read_text(), parse_constant=no_constant)
        for name in ("findings.json", "directions.json")
    }
    (finding,) = (finding for finding in read["findings.json"] if finding["kind"] == "not_finite")
    assert finding["number"] == broken and f"NaN or infinity in {broken} rows of {tensor}" in finding["text"]
    rows = [row for head in read["directions.json"] for line in head["lines"] for side in line["sides"]
            for row in side["rows"]]  # fmt: skip
    assert tensor != "wte.weight" or {*rows} <= {*range(finite)}
    for command in ("neighbours", "positions"):  # which need the rows themselves
        arguments = [source, "w1"] if command == "neighbours" else [source, "--out", tmp_path / "positions"]
        assert is_one_line(run(command, *arguments))
