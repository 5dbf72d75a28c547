"""`weightscope audit LIST.txt`: one folder each, one summary, failures that do not spread, resuming."""

import csv
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import weightscope as ws
from tests.attacks.attacks import TOKENIZERS
from tests.support import tasks
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.cli import main
from weightscope.core.files import HIDDEN, OutputFolder
from weightscope.heads.audit import batch
from weightscope.heads.audit.directions import directions_of


def run(*arguments: object) -> Result:
    """A command, without drawing figures: how they look is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "report_task", tasks.tables_alone)
        return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def said(result: Result) -> list[str]:
    """What a command had to say on stderr, its progress bar aside."""
    return re.findall(r"weightscope: .*", result.stderr)


def table(out: Path) -> list[dict[str, str]]:
    with (out / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, the second cut short, and a list that names a fourth which is not there."""
    folder = tmp_path_factory.mktemp("list")
    for step in (1, 2, 3):
        write_checkpoint(folder / f"step{step}", gpt2_weights(seed=step))
    weights = folder / "step2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "steps.txt").write_text("# a run\n" + "".join(f"{folder}/step{n}\n" for n in (1, 2, 3, 4)))
    return folder


@pytest.fixture(scope="module")
def first(work: Path) -> Result:
    return run("audit", work / "steps.txt", "--out", work / "out")


def test_those_that_fail_are_reported_and_the_others_finish(work: Path, first: Result) -> None:
    assert first.exit_code == 2
    lines = said(first)
    assert [line.split(": ")[:2] for line in lines] == [["weightscope", "step2"], ["weightscope", "step4"]]
    assert "no such file or folder" in lines[1]
    rows = table(work / "out")
    assert [row["status"] for row in rows] == ["failed", "failed", "ok", "ok"]  # the most severe first
    assert [row["name"] for row in rows[:2]] == ["step2", "step4"]
    assert [row["error"] == "" for row in rows] == [False, False, True, True]
    assert rows[2]["family"] == "gpt2" and rows[2]["layers"] == "2" and rows[2]["heads"] == "4"
    page = (work / "out" / "summary.html").read_text()
    assert "2 of 4 checkpoints audited, 16 heads. 2 failed." in page
    assert 'href="step1/report.html"' in page and "step4" in page


def test_resume_does_what_failed_or_changed_and_nothing_else(work: Path, first: Result, monkeypatch) -> None:
    asked: list[str] = []
    measure_task = batch.measure_task

    def counted(get_model, index, options, *ahead):
        asked.append(Path(get_model().source).name)
        return measure_task(get_model, index, options, *ahead)

    monkeypatch.setattr(batch, "measure_task", counted)
    before = {row["name"]: row for row in table(work / "out")}
    write_checkpoint(work / "step2", gpt2_weights(seed=2))
    write_checkpoint(work / "step4", gpt2_weights(seed=4))
    again = run("audit", work / "steps.txt", "--out", work / "out", "--resume")
    assert again.exit_code == 0 and not said(again)
    assert asked == ["step2", "step2", "step4", "step4"]  # of two layers each
    rows = table(work / "out")
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert all(row == before[row["name"]] for row in rows if row["name"] in {"step1", "step3"})

    asked.clear()
    assert run("audit", work / "steps.txt", "--out", work / "out", "--resume", "--window", 8).exit_code == 0
    assert list(dict.fromkeys(asked)) == ["step1", "step2", "step3", "step4"]


def test_a_checkpoint_whose_folder_was_written_by_another_audit_since_is_done_again(work: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(f"{work}/step1\n")
    run("audit", tmp_path / "one.txt", "--out", tmp_path / "out")
    heads = (tmp_path / "out" / "step1" / "heads.csv").read_bytes()
    assert run("audit", work / "step3", "--out", tmp_path / "out" / "step1", "--layers", 0).exit_code == 0
    assert (tmp_path / "out" / "step1" / "heads.csv").read_bytes() != heads
    assert run("audit", tmp_path / "one.txt", "--out", tmp_path / "out", "--resume").exit_code == 0
    assert (tmp_path / "out" / "step1" / "heads.csv").read_bytes() == heads


def test_one_list_at_a_time_writes_a_summary(work: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(f"{work}/step1\n")
    with OutputFolder(tmp_path / "out"):
        result = run("audit", tmp_path / "one.txt", "--out", tmp_path / "out")
    assert result.exit_code == 2
    (line,) = said(result)
    assert line.startswith("weightscope: out: another run is writing into this folder")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [HIDDEN]


def test_a_defect_met_in_one_checkpoint_does_not_keep_the_others(work: Path, tmp_path: Path, monkeypatch) -> None:
    measure_task = batch.measure_task

    def defective(get_model, index, options, *ahead):
        if "step3" in get_model().source:
            raise ZeroDivisionError("layer 1")
        return measure_task(get_model, index, options, *ahead)

    monkeypatch.setattr(batch, "measure_task", defective)
    (tmp_path / "two.txt").write_text(f"{work}/step3\n{work}/step1\n")
    result = run("audit", tmp_path / "two.txt", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert said(result) == ["weightscope: step3: ZeroDivisionError: layer 1"]
    assert [row["status"] for row in table(tmp_path / "out")] == ["failed", "ok"]


def test_a_failure_names_its_source_once_and_leaves_no_bar(work: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "List.TXT").write_text(f"{work}/step1\n{tmp_path}/empty\n")
    run("audit", tmp_path / "List.TXT", "--out", tmp_path / "out")
    again = run("audit", tmp_path / "List.TXT", "--out", tmp_path / "out", "--resume")
    assert again.exit_code == 2
    assert again.stderr == "weightscope: empty: no .safetensors file here; there is nothing\n"


def test_names_that_a_spreadsheet_would_take_for_formulas_are_kept_like_others(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("=a", "+b", "@c"):
        (tmp_path / name).symlink_to(work / "step1")
    (tmp_path / "list.txt").write_text("=a\n+b\n@c\n")
    monkeypatch.chdir(tmp_path)
    assert run("audit", "list.txt", "--out", "out").exit_code == 0
    assert [row["name"] for row in table(tmp_path / "out")] == ["'=a", "'+b", "'@c"]
    monkeypatch.setattr(batch, "measure_task", None)  # not called
    assert run("audit", "list.txt", "--out", "out", "--resume").exit_code == 0
    assert [row["status"] for row in table(tmp_path / "out")] == ["ok"] * 3


def test_a_list_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    result = run("audit", tmp_path / "none.Txt", "--out", tmp_path / "out")
    assert result.exit_code == 2
    line = "weightscope: none.Txt: there is no such list; a SOURCE in .txt is a file with one source per line\n"
    assert result.stderr == line
    assert not (tmp_path / "out").exists()


def test_a_folder_named_like_a_list_is_a_checkpoint(work: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.txt", gpt2_weights())
    assert run("audit", tmp_path / "model.txt", "--out", tmp_path / "out", "--layers", 0).exit_code == 0
    assert (tmp_path / "out" / "heads.csv").exists()


def test_a_broken_summary_is_as_none(work: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(f"{work}/step1\n")
    run("audit", tmp_path / "one.txt", "--out", tmp_path)
    (tmp_path / "summary.csv").write_text("name,status\nstep1,ok\n")
    assert run("audit", tmp_path / "one.txt", "--out", tmp_path, "--resume").exit_code == 0
    assert [row["status"] for row in table(tmp_path)] == ["ok"]


def test_a_tokenizer_that_would_end_the_process_costs_its_source_token_names_alone(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for name in ("first", "second"):
        write_checkpoint(tmp_path / name, gpt2_weights())
        (tmp_path / name / "tokenizer.json").write_bytes(TOKENIZERS["a merge that aborts"][0])
    (tmp_path / "list.txt").write_text(f"{tmp_path}/first\n{tmp_path}/second\n")
    result = run("audit", tmp_path / "list.txt", "--out", tmp_path / "out", "--layers", "0")
    assert result.exit_code == 0, result.output
    assert [row["status"] for row in table(tmp_path / "out")] == ["ok", "ok"]
    assert '"#0"' in (tmp_path / "out" / "first" / "directions.json").read_text()
    heads = ws.audit(ws.open_model(tmp_path / "first"), layers=[0], directions=0).measured
    _, note = directions_of(ws.open_model(tmp_path / "first"), heads, 1)[1]
    assert note.startswith("Tokens are shown as numbers: tokenizer.json: the tokenizers library does not survive it")
