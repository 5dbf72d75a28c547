"""Gates: status 3 and one line where a limit fails, results in any case; only JSON on stdout; the CI recipe."""

import csv
import json
import re
import shlex
import tomllib
from pathlib import Path
from string import Template

import numpy as np
import pytest
import yaml
from click.testing import Result

import weightscope as ws
from tests.support.commands import run_undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.cli import main
from weightscope.report.findings import finding_kinds

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "docs" / "release.md"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A checkpoint, the same a training step on, the same with a NaN, and one with a dead head."""
    folder, rng = tmp_path_factory.mktemp("work"), np.random.default_rng(0)
    good = gpt2_weights()
    write_checkpoint(folder / "good", good)
    steps = {name: (w * (1 + 0.01 * rng.standard_normal(w.shape))).astype(np.float32) for name, w in good.items()}
    write_checkpoint(folder / "step", steps)
    write_checkpoint(folder / "nan", good | {"h.1.attn.c_attn.weight": with_nan(good["h.1.attn.c_attn.weight"])})
    dead = good["h.0.attn.c_proj.weight"].copy()
    dead[6:12] = 0
    write_checkpoint(folder / "dead", good | {"h.0.attn.c_proj.weight": dead})
    return folder


def with_nan(weights: np.ndarray) -> np.ndarray:
    broken = weights.copy()
    broken[3, 2] = np.nan
    return broken


def stopped(result: Result) -> str:
    """The one line of a gate."""
    assert result.exit_code == 3, result.output
    assert ".," not in result.stderr and ".;" not in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("weightscope: ")
    return result.stderr


@pytest.mark.parametrize(
    ("name", "limits", "status"),
    [
        ("good", ["warning"], 0), ("nan", ["error"], 3), ("nan", ["warning"], 3), ("dead", ["error"], 0),
        ("dead", ["warning"], 3), ("dead", ["zero_head"], 3), ("dead", ["not_finite"], 0),
        ("dead", ["not_finite", "zero_head"], 3), ("nan", [], 0),
    ],
)  # fmt: skip
def test_audit_exits_3_on_the_chosen_findings(work: Path, tmp_path: Path, name, limits, status) -> None:
    result = run_undrawn("audit", work / name, "--out", tmp_path, *(f"--fail-on={limit}" for limit in limits))
    assert result.exit_code == status, result.output
    assert (tmp_path / "report.html").exists() and (tmp_path / "findings.csv").exists()
    if status:
        assert {"nan": "NaN or infinite", "dead": "exactly zero"}[name] in stopped(result)


def test_resumed_results_are_gated_again(work: Path, tmp_path: Path) -> None:
    assert run_undrawn("audit", work / "nan", "--out", tmp_path).exit_code == 0
    again = run_undrawn("audit", work / "nan", "--out", tmp_path, "--resume", "--fail-on", "error")
    assert "is up to date" in again.stdout
    stopped(again)
    kept = run_undrawn("audit", work / "nan", "--out", tmp_path, "--resume", "--json")
    assert json.loads(kept.stdout)["findings"][0]["kind"] == "not_finite"


def test_unknown_fail_on_value_is_refused_before_reading(work: Path, tmp_path: Path) -> None:
    for command in (["audit", work / "good"], ["compare", work / "good", work / "nan"]):
        result = run_undrawn(*command, "--out", tmp_path / "out", "--fail-on", "errors")
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert "--fail-on is 'errors'" in result.stderr and "rank_collapsed" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "options", "status"),
    [
        (["good", "step"], ["--max-change", 0.1], 0), (["good", "step"], ["--max-change", 0.001], 3),
        (["good", "nan"], ["--max-change", 10], 3), (["nan", "good"], ["--fail-on", "error"], 3),
        (["good", "dead"], ["--fail-on", "zero_head"], 3), (["good", "dead", "good"], ["--max-change", 0.9], 3),
        (["good", "good"], ["--max-change", 0, "--fail-on", "note"], 0),
    ],
)  # fmt: skip
def test_comparison_exits_3_on_the_chosen_limits(work: Path, tmp_path: Path, names, options, status) -> None:
    result = run_undrawn("compare", *(work / name for name in names), "--out", tmp_path, *options)
    assert result.exit_code == status, result.output
    assert (tmp_path / "report.html").exists()
    if status:
        stopped(result)


def test_stdout_holds_only_json(work: Path, tmp_path: Path) -> None:
    audit = run_undrawn("audit", work / "nan", "--out", tmp_path / "a", "--json", "--fail-on", "error")
    stopped(audit)
    result = json.loads(audit.stdout, parse_constant=pytest.fail)  # NaN is no JSON
    assert result["summary"]["family"] == "gpt2" and len(result["heads"]) == 8
    assert None in [head["qk_sigma1"] for head in result["heads"]]
    assert result["findings"] == json.loads((tmp_path / "a" / "findings.json").read_text())
    compared = run_undrawn("compare", work / "good", work / "nan", "--out", tmp_path / "c", "--json")
    result = json.loads(compared.stdout, parse_constant=pytest.fail)
    assert result["largest_change"] is None and result["heads"][0]["qk_change"] is None
    assert result["findings"][0]["severity"] == "error" and compared.exit_code == 0


def test_list_puts_the_most_severe_first_and_fails_with_it(work: Path, tmp_path: Path) -> None:
    names = ("good", "dead", "nan", "none")
    (tmp_path / "list.txt").write_text("".join(f"{work / name}\n" for name in names))
    result = run_undrawn("audit", tmp_path / "list.txt", "--out", tmp_path / "out", "--json", "--fail-on", "warning")
    assert result.exit_code == 2  # one could not be read, which is graver
    assert [entry["name"] for entry in json.loads(result.stdout)] == list(names)
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").open()))
    assert [row["name"] for row in rows] == ["none", "nan", "dead", "good"]
    assert rows[1]["errors"] == "1" and int(rows[2]["warnings"]) > 0 and rows[3]["warnings"] == "0"
    page = (tmp_path / "out" / "summary.html").read_text()
    assert page.index("nan/report.html") < page.index("dead/report.html") < page.index("good/report.html")
    (tmp_path / "list.txt").write_text("".join(f"{work / name}\n" for name in names[:3]))
    again = run_undrawn("audit", tmp_path / "list.txt", "--out", tmp_path / "out", "--resume", "--fail-on", "warning")
    assert "1 more of 3 checkpoints" in stopped(again)


@pytest.mark.parametrize(("name", "status"), [("step", 0), ("nan", 3)])
def test_recipe_passes_good_weights_and_stops_broken_ones(work: Path, tmp_path: Path, name, status) -> None:
    text, *_ = re.findall(r"```yaml\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    lines = [step["run"] for step in job["steps"] if "run" in step]
    assert lines[0] == 'pip install "weightscope-attention @ $WEIGHTSCOPE"'
    known = {"BASE": str(work / "good"), "CHECKPOINT": str(work / name)}
    assert {"WEIGHTSCOPE", *known} == set(workflow["env"])
    commands = [shlex.split(Template(line).substitute(known)) for line in lines[1:]]
    assert [command[:2] for command in commands] == [["weightscope", "audit"], ["weightscope", "compare"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert [run_undrawn(*command[1:]).exit_code for command in commands] == [status, status]
    assert (tmp_path / "weights" / "audit" / "report.html").exists()


def test_pre_commit_hook_stops_broken_weights(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook, run in the folder of a checkpoint as pre-commit runs it: one command, no names of files."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["language"] == "python" and hook["pass_filenames"] is False
    assert all(re.search(hook["files"], name) for name in ("a/model.safetensors", "config.json", "b.gguf"))
    assert not any(re.search(hook["files"], name) for name in ("README.md", "myconfig.json", "safetensors.py"))
    program, *arguments = [*shlex.split(hook["entry"]), *hook["args"]]
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, status in {"good": 0, "nan": 3}.items():
        monkeypatch.chdir(work / name)
        before = sorted(Path().iterdir())
        assert run_undrawn(*arguments).exit_code == status
        assert sorted(Path().iterdir()) == before
    *_, config = re.findall(r"```yaml\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    (repo,) = yaml.safe_load(config)["repos"]
    assert repo["hooks"] == [{"id": hook["id"]}] and repo["rev"] == f"v{ws.__version__}"


def test_recipe_names_existing_kinds_and_options() -> None:
    text = RECIPE.read_text()
    config_keys = {"transformers_weights", "residual_scale", "final_logit_softcapping", "logit_scale", "vocab_size"}
    config_keys |= {"max_position_embeddings", "model_type", "eos_token_id", "base_model"}
    for kind in set(re.findall(r"`(\w+_\w+)`", text)) - config_keys:
        assert kind in finding_kinds()
    for command, option in re.findall(r"`(audit|compare) (--[a-z-]+)", text):
        assert option in {name for parameter in main.commands[command].params for name in parameter.opts}


@pytest.mark.parametrize("command", [["audit", "good"], ["compare", "good", "none"]])
def test_foreign_file_in_the_folder_is_refused_before_reading(work: Path, tmp_path: Path, command) -> None:
    (tmp_path / "heads.csv").write_text("mine")
    result = run_undrawn(command[0], *(work / name for name in command[1:]), "--out", tmp_path)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("weightscope: heads.csv: is there already")
    assert [path.name for path in tmp_path.iterdir()] == ["heads.csv"]
    assert (tmp_path / "heads.csv").read_text() == "mine"
