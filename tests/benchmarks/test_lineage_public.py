"""Public lists of models, with stand-ins on a Hub of one's own."""

import csv

import pytest
from click.testing import CliRunner

from analyses.experiments.derivations import drifted
from analyses.experiments.lineage_attacks import random_base
from analyses.experiments.named_parts import read_weights, write_weights
from benchmarks.lineage_public import LISTS, main, pairs_of
from tests.support.small_llama import write_small_llama


def test_lists_have_the_published_sizes():
    """Zhu et al. judge 210 pairs of 21 models."""
    pairs = list(pairs_of(LISTS / "zhu.csv", every=True))
    assert (len(pairs), len({model for pair in pairs for model in pair[:2]})) == (210, 21)
    assert sum(pair.related for pair in pairs) == 69
    assert len({pair.suspect for pair in pairs_of(LISTS / "leafbench.csv", every=False)}) == 65


def test_list_that_cannot_be_read_is_named():
    result = CliRunner().invoke(main, ["--list", "awm"])
    assert result.exit_code == 2 and "the model pairs of AWM" in result.output


@pytest.mark.parametrize("weights", [False, True])
def test_pairs_are_judged_from_a_hub(hub, tmp_path, weights):
    base = write_small_llama(tmp_path / "base", layers=5)
    write_weights(drifted(read_weights(base), 0.1), tmp_path / "tuned")
    write_weights(random_base(read_weights(base)), tmp_path / "stranger")
    for name in ("base", "tuned", "stranger"):
        hub.publish(f"owner/{name}", tmp_path / name)
    listed = "model,parent\nowner/base,\nowner/tuned,owner/base\nowner/stranger,\nowner/gone,owner/base\n"
    (tmp_path / "list.csv").write_text(listed)
    options = ["--list", "zhu", "--file", str(tmp_path / "list.csv"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, [*options, *(["--weights"] if weights else [])])
    assert result.exit_code == 0, result.output
    with (tmp_path / "out" / "pairs.csv").open() as file:
        verdicts = {(row["suspect"], row["base"]): row["verdict"] for row in csv.DictReader(file)}
    assert verdicts["owner/tuned", "owner/base"] == "related"
    assert verdicts["owner/stranger", "owner/base"] == ("unrelated" if weights else "undecided")
    assert verdicts["owner/gone", "owner/base"] == ""
    assert "| related | 3 | 1 | 0 | 0 | 2 |" in result.output
