"""A study makes each plant in a folder of its own, judges it once, and writes one row."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import weightscope as ws
from analyses.experiments import planted_deeds
from analyses.study import judge_each, study, write
from tests.support.plants.plant import Made, Plant


def plant(name: str) -> Plant:
    def make(folder: Path) -> Made:
        (folder / "file").write_text(name)
        return Made(folder / "file")

    return Plant(name, make, {"same": "different"}, {"name": name})


def judged(plant: Plant, made: Made) -> dict[str, object]:
    return {"read": Path(made.suspect).read_text(), "expected": plant.expects["same"], "unknown": None}


def test_each_plant_is_judged_and_written(tmp_path: Path) -> None:
    @study("some")
    def main(files) -> None:
        write(files, "rows", ("name", "read", "unknown", "absent"), judge_each(map(plant, "abc"), judged, only="[ab]"))

    run = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert run.exit_code == 0 and run.output == f"{tmp_path}\n"
    assert (tmp_path / "rows.csv").read_text().splitlines() == ["name,read,unknown,absent", "a,a,,", "b,b,,"]


def test_rows_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    first = judge_each([plant("a")], judged, "rows", kept=tmp_path)
    assert first == judge_each([plant("a")], None, "rows", kept=tmp_path)


def test_an_error_is_one_line(tmp_path: Path) -> None:
    @study("some")
    def main(files) -> None:
        raise ws.CheckpointError("no such model")

    run = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert (run.exit_code, run.output) == (2, "some: no such model\n")


def test_table_of_deeds_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row per deed, family and container, as deeds.csv."""
    row = {"deed": "NaN", "family": "llama", "container": "F32", "logits": float("inf"), "rounding": 1e-5,
           "verdict": "different",
           "tensors_right": True, "named": True, "by_identity": "different",
           "identity_right": True, "said": "NaN or infinity"}  # fmt: skip
    monkeypatch.setattr(planted_deeds, "rows_of", lambda *_: iter([row]))
    planted_deeds.main.callback(out=tmp_path, families="llama", containers="F32", deeds="")  # type: ignore[misc]
    lines = (tmp_path / "deeds.csv").read_text().splitlines()
    assert lines[0].startswith("deed,family,container,logits")
    assert lines[1].startswith("NaN,llama,F32,inf,1e-05,different")
