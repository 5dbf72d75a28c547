"""Fingerprints come from strangers: each that is not one is one clear error, and none decides how much is computed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.prints import sketches_of
from weightscope.pairs.lineage import matching, sketches
from weightscope.pairs.lineage.sketches import POINTS, SKETCH, Sketches, fingerprint, load


@pytest.fixture(scope="module")
def embedded() -> Sketches:
    return fingerprint("embedded")


@pytest.fixture
def path(embedded: Sketches, tmp_path: Path) -> Path:
    """A good fingerprint, to be spoilt."""
    embedded.save(tmp_path / "spoilt.wsf")
    return tmp_path / "spoilt.wsf"


def described(path: Path, text: str = "", **changes: Any) -> None:
    """Write it with another description."""
    about = {"version": 1, "name": "x", "d_model": 8, "layers": 8, "heads": 8, "kv_heads": 8, "vocabulary": 8}
    save_file(load_file(path), path, {"weightscope": text or json.dumps(about | changes)})


def stored_as(path: Path, name: str, dtype: str, content: bytes | None = None) -> None:
    """Write it with one array of another dtype."""
    body, header = b"", {"__metadata__": {"weightscope": json.dumps(load(path).about | {"version": 1})}}
    for each, array in load_file(path).items():
        named = {"int8": "I8", "int32": "I32", "float16": "F16", "float32": "F32"}[array.dtype.name]
        raw, kind = array.tobytes(), named
        if each == name:
            kind, raw = dtype, np.full(array.shape, 1e308).tobytes() if dtype == "F64" else b"\x7f" * array.size
        header[each] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def with_heads(path: Path, **values: int) -> None:
    """Write it with one number of the first head's."""
    about, arrays = load(path).about, load_file(path)
    for name, value in values.items():
        arrays["heads"][("layer", "head", "kv_head").index(name), 0] = value
    save_file(arrays, path, {"weightscope": json.dumps(about | {"version": 1})})


HOSTILE = {
    "99,000 brackets": (lambda path: described(path, "[" * 99_000), "is not valid JSON"),
    "a million brackets": (lambda path: described(path, "[" * 1_000_000), "has 1000016 lists"),
    "nested objects": (lambda path: described(path, '{"a":' * 900 + "1" + "}" * 900), "nests deeper"),
    "a vocabulary of 10**400": (lambda path: described(path, vocabulary=10**400), "vocabulary should be whole"),
    "a vocabulary of 5,000 digits": (
        lambda path: described(path, '{"name":"x","version":1,"vocabulary":' + "9" * 5000 + "}"), "is not valid JSON"),
    "a negative width": (lambda path: described(path, d_model=-8), "d_model should be whole numbers from 1"),
    "a width of zero": (lambda path: described(path, d_model=0), "d_model should be"),
    "a width that is true": (lambda path: described(path, d_model=True), "d_model should be"),
    "a name of a million letters": (lambda path: described(path, name="\U000e0001" * 1_000_000), "its name should be"),
    "a family that is a list": (lambda path: described(path, family=["gpt2"]), "its family should be"),
    "spectra of 1e308": (lambda path: stored_as(path, "spectra", "F64"), "(spectra)"),
    "sketches of 1e308": (lambda path: stored_as(path, "direct", "F64"), "(direct)"),
    "norms of 1e308": (lambda path: stored_as(path, "norms", "F64"), "(norms)"),
    "a dtype that NumPy has not": (lambda path: stored_as(path, "tokens", "F8_E8M0"), "(tokens)"),
    "heads in bytes": (lambda path: stored_as(path, "heads", "F8_E8M0"), "(heads)"),
    "a negative layer": (lambda path: with_heads(path, layer=-1), "(heads)"),
    "a negative head": (lambda path: with_heads(path, kv_head=-7), "(heads)"),
}  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_fingerprint_is_one_clear_error(attack: str, path: Path) -> None:
    spoil, expected = HOSTILE[attack]
    spoil(path)
    with pytest.raises(ws.CheckpointError) as caught:
        ws.lineage("embedded", path)
    message = str(caught.value)
    assert expected in message and message.startswith("spoilt.wsf: is ") and message.isprintable()
    assert len(message) < 300


def written(path: Path, layers: int, heads: int, rows: int = 0) -> Path:
    """A fingerprint of so many heads in all layers, or with so many rows for layers, in a file of few megabytes."""
    n, rows = heads, rows or layers
    index = np.arange(n, dtype=np.int32)
    arrays = {
        "direct": np.zeros((n, 2, SKETCH), np.int8), "tokens": np.zeros((n, 2, 0), np.int8),
        "spectra": np.zeros((n, 2, POINTS), np.float16), "norms": np.ones((n, 2), np.float32),
        "heads": np.stack([index % layers, index, index]), "layers_direct": np.zeros((1, 2 * SKETCH), np.int8),
        "layers_tokens": np.zeros((1, 0), np.int8), "layers_spectra": np.zeros((rows, 2 * POINTS), np.float16),
    }  # fmt: skip
    about = {"version": 1, "name": "x", "d_model": 8, "layers": 8, "heads": 8, "kv_heads": 8, "vocabulary": None}
    save_file(arrays, path, {"weightscope": json.dumps(about)})
    return path


@pytest.mark.parametrize(
    ("layers", "heads", "rows", "expected"),
    [
        (60, 60_000, 0, "has 60,000 heads; at most 32,768 are compared"),
        (20_000, 20_000, 0, "has 20,000 layers with attention; at most 512 are compared"),
        (2, 4, 900_000, "has 900,000 layers with attention; at most 512 are compared"),
    ],
)  # fmt: skip
def test_sizes_are_refused_before_anything_is_compared(
    layers: int, heads: int, rows: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000,000 rows in a registry made 19 GiB of differences, 60,000 heads 7 GiB of cosines."""
    (tmp_path / "prints").mkdir()
    path = written(tmp_path / "prints" / "large.wsf", layers, heads, rows)
    monkeypatch.setattr(matching, "linear_sum_assignment", None, raising=False)
    with pytest.raises(ws.CheckpointError, match=expected):
        ws.lineage("embedded", path.parent if rows else path)


def test_a_checkpoint_of_too_many_layers_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "MOST_LAYERS", 1)
    with pytest.raises(ws.CheckpointError, match="has 4 layers with attention; at most 1 are compared"):
        ws.lineage("embedded", "embedded")


def test_a_layer_of_too_many_heads_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two layers of 30,000 heads are within the limits of each, and would be assigned for days."""
    suspect = load(written(tmp_path / "suspect.wsf", 1, 30_000))
    with pytest.raises(ws.CheckpointError, match=r"30,000 takes 3e\+13 steps; at most 1e\+11"):
        matching.matches(suspect, load(written(tmp_path / "base.wsf", 1, 30_000)))


def test_sampled_pairs_show_how_alike_other_heads_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 6, 2, SKETCH)) + 2 * rng.standard_normal((1, 1, 2, SKETCH))
    matched = []
    for looked_at in (1 << 22, 50):
        monkeypatch.setattr(matching, "LOOKED_AT", looked_at)
        matched.append(matching.matches(sketches_of(values), sketches_of(values))["direct"])
    assert all(match.is_everywhere for match in matched)
    assert matched[1].elsewhere == pytest.approx(matched[0].elsewhere, rel=0.05)


def test_one_damaged_fingerprint_does_not_stop_a_registry(embedded: Sketches, tmp_path: Path) -> None:
    """It is named. Where nothing else is found, it might have been the base: the verdict is open."""
    embedded.save(tmp_path / "good.wsf")
    (tmp_path / "junk.wsf").write_text("no fingerprint")
    shutil.copy(tmp_path / "good.wsf", tmp_path / "late.wsf")  # damaged where only the heads are
    with_heads(tmp_path / "late.wsf", layer=-1)
    lineage = ws.lineage("embedded", tmp_path)
    assert lineage.base == embedded.name
    assert [each.partition(":")[0] for each in lineage.unread] == ["junk.wsf", "late.wsf"]
    assert "junk.wsf: is not a fingerprint" in str(lineage) and lineage.as_json()["unread"] == lineage.unread
    shuffled = np.random.default_rng(0).permuted(embedded.direct)
    replace(embedded, direct=shuffled, tokens=embedded.tokens[..., :0]).save(tmp_path / "good.wsf")
    unlike = ws.lineage("embedded", tmp_path)
    assert unlike.verdict == "undecided" and "junk.wsf: is not a fingerprint" in unlike.lead


def test_a_registry_of_damaged_fingerprints_alone_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.wsf").write_text("no fingerprint")
    with pytest.raises(ws.CheckpointError, match=r"^a\.wsf: is not a fingerprint"):
        ws.lineage("embedded", tmp_path)


@pytest.mark.check
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_fingerprint_cut_while_being_read_is_refused(path: Path) -> None:
    """Reading it where it was mapped ended the process with SIGBUS."""
    content = path.read_bytes()
    program = (
        "import sys, weightscope as ws\n"
        "from weightscope.pairs.lineage.sketches import load\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    for _ in range(20):\n"
        "        try: load(sys.argv[1])\n"
        "        except ws.CheckpointError as error: pass\n"
        "    print('done', flush=True)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert reader.stdin and reader.stdout and reader.stdout.readline() == "ready\n"
    reader.stdin.write("again\n" * 10)
    reader.stdin.close()
    while reader.poll() is None:
        os.truncate(path, 5_000)  # within the header's data
        with path.open("r+b") as file:
            file.write(content)
    assert reader.returncode != -signal.SIGBUS and reader.returncode == 0
    assert reader.stdout.read().count("done") == 10
