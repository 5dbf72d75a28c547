"""The command line as a user meets it: files as promised, one clear line for bad input, nothing half written."""

import csv
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import weightscope as ws
from tests.support import tasks
from tests.support.commands import run_undrawn as run
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from weightscope.cli import main
from weightscope.core.files import REPORT, OutputFolder
from weightscope.heads.audit import batch

TEXT = "the cat sat on the mat. the dog sat on the cat, and the mat was flat. a hat on a cat is that.\n" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with a byte-level BPE of 300 tokens, a corpus, and its counts."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
    folder = write_checkpoint(tmp_path_factory.mktemp("cli"), gpt2_weights(vocab=300), vocab_size=300)
    tokenizer = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator([TEXT], vocab_size=300, min_frequency=1, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "corpus.txt").write_text(TEXT)
    result = run("bigrams", folder / "corpus.txt", "--tokenizer", folder, "--out", folder / "counts.npz")
    assert result.exit_code == 0 and ": 1 document, " in result.output, result.output
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def refused(*arguments: object) -> str:
    """The one line on stderr of a command that must end with status 2."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("weightscope: ")
    return result.stderr


def test_detok_writes_what_is_promised(folder: Path, tmp_path: Path) -> None:
    result = run("detok", folder, "--counts", folder / "counts.npz", "--out", tmp_path, "--token", " cat")
    assert result.exit_code == 0, result.output
    table = rows(tmp_path / "heads.csv")
    assert [row["head"] for row in table] == ["0", "1", "2", "3"]
    assert list(table[0]) == [
        "head", "auroc", "auroc_paper", "auroc_specific", "auroc_constant", "tokens_scored", "auroc_by_frequency",
    ]  # fmt: skip
    with np.load(tmp_path / "tokens.npz") as arrays:
        auroc = arrays["auroc"]
    assert auroc.shape == (4, 300)
    for row in table:
        scored = auroc[int(row["head"])]
        assert float(row["auroc"]) == pytest.approx(np.nanmean(scored), abs=1e-5)
        assert float(row["auroc_paper"]) == pytest.approx(np.nan_to_num(scored).mean(), abs=1e-5)
        assert int(row["tokens_scored"]) == np.isfinite(scored).sum()
    page = (tmp_path / "report.html").read_text()
    assert "Table 2" in page and page.count("<svg") == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        ".weightscope", "heads.csv", "tokens.npz", *REPORT, "auroc.png", "auroc.svg", "roc.png", "roc.svg",
        "auroc.figure.csv", "roc.figure.csv",
    }  # fmt: skip
    (tmp_path / "my-roc.png").write_bytes(b"")
    assert run("detok", folder, "--counts", folder / "counts.npz", "--out", tmp_path).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        ".weightscope", "heads.csv", "tokens.npz", *REPORT, "auroc.png", "auroc.svg", "my-roc.png",
        "auroc.figure.csv",
    }  # fmt: skip


def test_neighbours_are_the_highest_t_ee_of_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    result = run("neighbours", folder, " cat", "--head", 2, "--top", 7, "--csv", tmp_path / "n.csv")
    assert result.exit_code == 0, result.output
    rows_written = rows(tmp_path / "n.csv")
    assert [int(row["rank"]) for row in rows_written] == list(range(1, 8))
    from tokenizers import Tokenizer

    token = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(" cat").ids[0]
    model = ws.open_model(folder)
    e, p, head = model.embeddings.tokens.astype(np.float64), model.positions.astype(np.float64), model.layer(0).head(2)
    c = np.sqrt((e[:, None] + p).var(axis=-1) + 1e-5).mean(axis=1)  # the paper's e~ = e / c
    scores = (e[token] / c[token]) @ head.qk.dense() @ (e / c[:, None]).T
    best = np.argsort(-scores)[:7]
    assert [int(row["token_id"]) for row in rows_written] == best.tolist()
    assert [float(row["score"]) for row in rows_written] == pytest.approx(scores[best].tolist(), rel=1e-4)
    assert all(row["joined"] == row["token"] + " cat" for row in rows_written)


def test_positions_are_scaled_as_in_the_papers_code(folder: Path, tmp_path: Path) -> None:
    """t_p by the mean of 1/sigma_j over tokens; t_pp by that and by the mean of 1/sigma_i at the query."""
    assert run("positions", folder, "--out", tmp_path, "--query", 20).exit_code == 0
    model = ws.open_model(folder)
    e, p = model.embeddings.tokens.astype(np.float64), model.positions.astype(np.float64)
    sigma = np.sqrt((e[:, None] + p).var(axis=-1) + 1e-5)  # (V, L)
    with np.load(tmp_path / "positions.npz") as arrays:
        assert arrays["t_p"].shape == arrays["t_pp"].shape == (4, 32)
        for head in model.layer(0).heads:
            t_p = p @ head.qk_bias * (1 / sigma).mean(axis=0)
            t_pp = p[20] @ head.qk.dense() @ p.T * (1 / sigma).mean(axis=0) * (1 / sigma[:, 20]).mean()
            np.testing.assert_allclose(arrays["t_p"][head.index], t_p, rtol=2e-4, atol=1e-5)
            np.testing.assert_allclose(arrays["t_pp"][head.index], t_pp, rtol=2e-4, atol=1e-5)
    assert [row["head"] for row in rows(tmp_path / "trends.csv")] == ["0", "1", "2", "3"]


def test_positions_leave_no_figure_of_another_run(folder: Path, tmp_path: Path) -> None:
    for head in (0, 3):
        assert run("positions", folder, "--out", tmp_path, "--head", head).exit_code == 0
        assert {path.name.partition(".")[0] for path in tmp_path.glob("positions-head-*")} == {f"positions-head-{head}"}


@pytest.mark.check
def test_positions_on_text_are_next_to_attention(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="running a model needs the extra `runner`")
    (tmp_path / "a.txt").write_text("\n\n".join(f"On day {n} the crew of the ship saw land again." for n in range(300)))
    result = run("positions", "embedded", "--text", tmp_path / "a.txt", "--out", tmp_path / "o")
    assert result.exit_code == 0, result.output
    assert [row["term"] for row in rows(tmp_path / "o" / "contributions.csv")][:6] == ["ee", "pp", "pe", "ep", "e", "p"]
    page = (tmp_path / "o" / "report.html").read_text()
    assert "What happens on text" in page and "passages of 1 document of a.txt" in page
    assert run("positions", "embedded", "--unscaled", "--on-text", "--out", tmp_path / "o").exit_code == 2


def test_unscaled_positions_of_a_checkpoint_without_tokens(tmp_path: Path) -> None:
    weights = gpt2_weights()
    del weights["wte.weight"]
    folder = write_checkpoint(tmp_path / "model", weights)
    assert "no token embedding in this checkpoint" in refused(
        "detok", folder, "--counts", "c.npz", "--out", tmp_path / "o"
    )
    assert "weightscope positions --unscaled` works without" in refused("positions", folder, "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    assert "not in this checkpoint" in run("inspect", folder).output
    assert run("positions", folder, "--unscaled", "--out", tmp_path / "o").exit_code == 0
    model = ws.open_model(folder)
    with np.load(tmp_path / "o" / "positions.npz") as arrays:
        head, p = model.layer(0).head(3), model.positions
        np.testing.assert_allclose(arrays["t_p"][3], p @ head.qk_bias, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(arrays["t_pp"][3], p[15] @ head.qk.dense() @ p.T, rtol=1e-4, atol=1e-5)


def test_counts_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    another_tokenizer = ByteLevelBPETokenizer()
    another_tokenizer.train_from_iterator(
        ["quite another text, quite another vocabulary"] * 9, vocab_size=290, show_progress=False
    )
    another_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert run("bigrams", folder / "corpus.txt", "--tokenizer", tmp_path, "--out", tmp_path / "c.npz").exit_code == 0
    message = refused("detok", folder, "--counts", tmp_path / "c.npz", "--out", tmp_path / "o")
    assert "c.npz: counted with another tokenizer" in message
    assert not (tmp_path / "o").exists()


def test_counts_cut_short_are_refused(folder: Path, tmp_path: Path) -> None:
    content = (folder / "counts.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(content[: len(content) // 2])
    assert "c.npz: " in refused("detok", folder, "--counts", tmp_path / "c.npz", "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_text_of_several_tokens_says_what_it_splits_into(folder: Path) -> None:
    assert "splits into 'z' + 'e' + 'b' + 'r' + 'a'" in refused("neighbours", folder, "zebra")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "/no/such/folder"], "no such file or folder: /no/such/folder"),
        (["neighbours", "FOLDER", " cat", "--head", "4"], "no head 4: a layer has 4"),
        (["detok", "FOLDER", "--layer", "9", "--counts", "FOLDER/counts.npz", "--out", "OUT"], "no layer 9"),
        (["positions", "FOLDER", "--query", "32", "--out", "OUT"], "query position 32 is outside 7 .. 31"),
        (["inspect", "FOLDER", "--family", "gtp2"], "no family is called 'gtp2'"),
    ],
)
def test_bad_input_is_one_clear_line(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    filled = [a.replace("FOLDER", str(folder)).replace("OUT", str(tmp_path / "o")) for a in arguments]
    assert message in refused(*filled)
    assert not (tmp_path / "o").exists()


def test_bigrams_are_not_counted_for_a_checkpoint_without_tokens(tmp_path: Path) -> None:
    message = refused("detok", fixture("vit").folder, "--out", tmp_path / "out")
    assert "vit has no token embedding" in message and "--counts" not in message


@pytest.mark.parametrize(
    "command",
    [
        ["detok", "embedded", "--out", "file/out"],
        ["audit", "embedded", "--out", "file/out"],
        ["positions", "embedded", "--out", "file/out"],
        ["compare", "embedded", "embedded", "--out", "file/out"],
        ["neighbours", "embedded", "ibility", "--csv", "file/out/a.csv"],
        ["bigrams", "nowhere.txt", "--tokenizer", "embedded", "--out", "file/out/c.npz"],
    ],
    ids=lambda command: command[0],
)
def test_unwritable_output_is_refused_before_computing(command: list[str], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = run(*command)
    assert result.exit_code == 2
    assert result.stderr == "weightscope: nothing can be written to file/out (Not a directory)\n"


def test_revision_of_a_local_path_is_refused(folder: Path) -> None:
    """Somebody who compares two revisions of a local clone would compare one with itself."""
    result = run("inspect", folder, "--revision", "v2")
    assert result.exit_code == 2
    assert result.stderr.endswith("is on this machine; a revision (v2) is one of the Hub's\n")


def test_inspect_prints_nothing_if_it_fails() -> None:
    result = run("inspect", "embedded", "--family", "llama")
    assert result.exit_code == 2
    assert not result.stdout


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "weightscope", "inspect", "embedded"]
    assert "family      gpt2" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("command", "work"),
    [
        (["compare", "embedded", "embedded"], "pairs.compare.compare:compare"),
        (["detok", "embedded"], "heads.detok.heads:measure_heads"),
        (["circuits", "embedded"], "heads.circuits.circuits:circuits"),
    ],
)
def test_folder_in_use_is_refused_before_computing(
    command: list[str], work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = work.split(":")
    monkeypatch.setattr(import_module(f"weightscope.{module}"), name, None)
    with OutputFolder(tmp_path):
        result = CliRunner().invoke(main, [*command, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "another run is writing into this folder" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8"])
def test_character_that_the_output_encoding_lacks_is_spelled_out(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As σ₁ where a Windows console is redirected, and a file's name that is not UTF-8 anywhere."""
    monkeypatch.setattr(batch, "report_task", tasks.tables_alone)
    checkpoint = write_checkpoint(tmp_path / "σ", gpt2_weights(n_layers=1))
    for out in (tmp_path / "σ₁", tmp_path / "\udcff"):
        result = CliRunner(charset=encoding).invoke(main, ["audit", str(checkpoint), "--out", str(out)])
        assert result.exit_code == 0 and result.exception is None, result.exception
        shown = str(out / "report.html").encode(encoding, "backslashreplace")
        assert result.stdout_bytes.splitlines()[-1] == shown
    missing = CliRunner(charset=encoding).invoke(main, ["inspect", str(tmp_path / "₂\udcff.safetensors")])
    assert missing.exit_code == 2 and missing.stderr.count("\n") == 1
