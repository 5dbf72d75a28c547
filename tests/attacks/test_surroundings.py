"""What surrounds a run: clocks, locales, other runs, files that change, and names that a terminal obeys."""

import bz2
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.attacks.changing_files import run as run_on_changing_files
from tests.support.figures import undrawn
from tests.support.hub_server import Hub
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.cli import main
from weightscope.model.run_identity import _in_words
from weightscope.model.text.corpus import read_documents

SMALL = Path(ws.__file__).parent / "core" / "embedded"


@pytest.mark.parametrize("seconds", [-(2**33), -1, 0, 2**33, 2**40, 2**62])
def test_a_file_may_have_any_time(seconds: int, tmp_path: Path) -> None:
    """Before 1970, or in a year that no calendar of Python has; it is known by content all the same."""
    model = write_checkpoint(tmp_path / "model", gpt2_weights())
    words = _in_words({"name": "model.safetensors", "size": 1, "modified": seconds * 10**9})
    assert words.startswith("model.safetensors of 1 bytes, ")
    try:
        os.utime(model / "model.safetensors", (seconds, seconds))
    except OverflowError:  # this system's files have no such times
        return
    with undrawn():
        for options in ((), ("--resume",)):
            done = CliRunner().invoke(main, ["audit", str(model), "--out", str(tmp_path / "out"), *options])
            assert done.exit_code == 0 and done.exception is None, done.output


@pytest.mark.parametrize("jump", [-(10**9), 10**9])
def test_a_clock_that_jumps_changes_nothing(jump: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, results, now = write_checkpoint(tmp_path / "model", gpt2_weights()), [], time.time
    for clock in (now, lambda: now() + jump * (int(now() * 1000) % 2)):
        monkeypatch.setattr(time, "time", clock)
        out = tmp_path / str(len(results))
        with undrawn():
            assert CliRunner().invoke(main, ["audit", str(model), "--out", str(out)]).exit_code == 0
        results.append((out / "heads.csv").read_bytes())
    assert results[0] == results[1]


LOCALES = (
    {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"LC_ALL": "tr_TR.UTF-8"},
)  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("locale", LOCALES, ids=["C", "ASCII", "Turkish"])
def test_a_locale_changes_no_result(locale: dict[str, str], tmp_path: Path) -> None:
    """`tr_TR` has another upper case of i in C's functions, not in Python's; ASCII alone has no σ."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    results = []
    for number, variables in enumerate(({"LC_ALL": "C.UTF-8"}, locale)):
        out = tmp_path / f"{number}-\u0131\u0130"
        command = [sys.executable, "-m", "weightscope", "audit", "embedded", "--out", str(out)]
        done = subprocess.run(command, env=plain | variables, cwd=Path(__file__).parents[2], capture_output=True)
        assert done.returncode == 0, done.stderr
        results.append({path.name: path.read_bytes() for path in out.glob("*.csv")})
    assert results[0] == results[1]


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
@pytest.mark.parametrize("packing", ["gz", "bz2", "zst"])
@pytest.mark.parametrize("fault", ["bomb", "cut"])
def test_a_packed_corpus_that_explodes_or_is_cut(ending: str, packing: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / f"corpus{ending}.{packing}"
    packers = {"gz": gzip.compress, "bz2": bz2.compress}
    pack = packers.get(packing) or pytest.importorskip("zstandard").ZstdCompressor(1).compress
    content = pack(b"a" * 100_000_000 if fault == "bomb" else b'{"text": "words"}\n')
    path.write_bytes(content if fault == "bomb" else content[:-5])
    with pytest.raises(ws.CheckpointError, match=r"unpacks to more than|bytes in a line|cannot be read"):
        read_documents([path])


@pytest.mark.check
def test_two_runs_share_the_hubs_cache(hub: Hub, tiny_gpt2: Path, tmp_path: Path) -> None:
    """Begun at once on an empty cache, and once more on one in which a run was killed while it wrote."""
    hub.publish("owner/tiny", tiny_gpt2)
    program = (
        "import sys; from huggingface_hub import constants as c; c.ENDPOINT = sys.argv[1];"
        "c.HUGGINGFACE_CO_URL_TEMPLATE = sys.argv[1] + '/{repo_id}/resolve/{revision}/{filename}';"
        "import weightscope as ws; m = ws.open_model('owner/tiny');"
        "print(ws.audit(m).heads.csv())"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.hub, "OMP_NUM_THREADS": "1"}
    environment.pop("HF_TOKEN", None)

    def begun() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, hub.hub], env=environment, text=True, cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    expected = ws.audit(ws.open_model(tiny_gpt2)).heads.csv().strip()
    for _ in range(2):
        runs = [begun(), begun()]
        ended = [run.communicate() for run in runs]
        assert [run.returncode for run in runs] == [0, 0], ended
        assert {out.strip() for out, _ in ended} == {expected}
        for path in [*(tmp_path / "home").rglob("*")]:  # what a run that was killed might leave
            if path.is_file():
                path.with_name(f"{path.name}.partial").write_bytes(b"x")


@pytest.mark.check
def test_files_that_change_while_they_are_read() -> None:
    assert run_on_changing_files(10, 0).total() > 5


# Commands, two of which write one place at once, and the file that tells whose result is there.
AT_ONCE = {
    "audit SOURCE --out OUT": "heads.csv",
    "atlas LIST --out OUT": "checkpoints.csv",
    "compare embedded SOURCE --out OUT": "trajectory.csv",
    "id SOURCE --out OUT/x.id.json": "x.id.json",
    "card SOURCE --out OUT/README.md": "README.md",
}


@pytest.mark.check
@pytest.mark.parametrize("words", AT_ONCE)
def test_two_runs_that_write_one_place_leave_one_whole_result(words: str, tmp_path: Path) -> None:
    """Begun at once on two checkpoints: each run ends well or in one line, and the result is whole, from one run."""
    weights = load_file(SMALL / "model.safetensors")
    for number in (1, 2):
        source = Path(shutil.copytree(SMALL, tmp_path / f"source{number}" / "model"))
        save_file({name: number * w for name, w in weights.items()}, source / "model.safetensors")
        (tmp_path / f"source{number}" / "list.txt").write_text(f"{source}\n")

    def begun(number: int, out: str) -> subprocess.Popen[str]:
        folder = tmp_path / f"source{number}"
        places = {"SOURCE": str(folder / "model"), "LIST": str(folder / "list.txt")}
        said = [places.get(word, word.replace("OUT", str(tmp_path / out))) for word in words.split()]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "weightscope", *said], env=environment, text=True, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def read(out: str) -> str:
        text = (tmp_path / out / AT_ONCE[words]).read_text()
        return text if words[:2] != "id" else json.loads(text)["wsid"]

    alone = set()
    for number in (1, 2):
        run = begun(number, f"alone{number}")
        assert run.communicate() and run.returncode in (0, 3)
        alone.add(read(f"alone{number}"))
    assert len(alone) == 2
    runs = [begun(number, "both") for number in (1, 2)]
    for run in runs:
        _, error = run.communicate()
        assert run.returncode in (0, 3) or (run.returncode == 2 and error.count("\n") == 1), error
    assert any(run.returncode in (0, 3) for run in runs)
    assert read("both") in alone
    assert not list((tmp_path / "both").rglob("*.partial"))


NAME = "a\nb\u202eevil\u2066x\x1b[2J\u2028y\x7f\u200f\u0085\ufeff"
OBEYED = [character for character in NAME if not character.isprintable() and character not in "\n\x1b"] + ["\x1b[2J"]


@pytest.mark.check
@pytest.mark.parametrize(
    "words",
    [
        "inspect MODEL --check", "audit MODEL --all --directions 2 --out OUT", "compare MODEL OTHER --all --out OUT",
        "compare MODEL OTHER --max-change 0.1 --out OUT", "circuits MODEL --out OUT",
        "neighbours MODEL ibility --head 5", "positions MODEL --out OUT",
    ],
)  # fmt: skip
def test_names_are_spelled_out_on_the_terminal_and_on_pages(words: str, tmp_path: Path) -> None:
    """Of folders, tensors, metadata, tokens, and whatever a config says."""
    weights = load_file(SMALL / "model.safetensors")
    weights |= {NAME: np.zeros((30, 30), np.float32), f"transformer.h.0.{NAME}": np.full((4, 4), np.nan, np.float32)}
    places = {"MODEL": tmp_path / f"m{NAME}", "OTHER": tmp_path / f"o{NAME}", "OUT": tmp_path / "out"}
    for factor, name in enumerate(("MODEL", "OTHER"), 1):
        shutil.copytree(SMALL, places[name])
        scaled = {key: (values * factor).astype(values.dtype) for key, values in weights.items()}
        save_file(
            scaled | ({f"z{NAME}": np.ones(3)} if factor == 2 else {}), places[name] / "model.safetensors", {"m": NAME}
        )
        config = json.loads((SMALL / "config.json").read_text())
        (places[name] / "config.json").write_text(
            json.dumps(config | {"_name_or_path": NAME, "architectures": [NAME], NAME: NAME})
        )
        tokenizer = json.loads((SMALL / "tokenizer.json").read_text())
        added = {"content": NAME, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"].append({"id": 7999, **added, "special": True})
        model = tokenizer["model"]
        last = next(token for token, index in model["vocab"].items() if index == 7999)
        del model["vocab"][last]
        model["merges"] = [m for m in model["merges"] if "".join(m.split() if isinstance(m, str) else m) != last]
        (places[name] / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = CliRunner().invoke(main, [str(places.get(word, word)) for word in words.split()])
    assert result.exit_code in (0, 3), result.output
    pages = [path.read_text() for path in places["OUT"].rglob("*") if path.suffix in (".html", ".svg")]
    for text in (result.output, result.stderr, *pages):
        assert not [character for character in OBEYED if character in text]
