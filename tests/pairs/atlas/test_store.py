"""What an atlas keeps is used again only where all that it depends on is the same."""

import io
import json
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from weightscope.core.errors import CheckpointError
from weightscope.model.run_identity import keep_arrays, kept_arrays
from weightscope.model.sources import Source
from weightscope.pairs.atlas.descent import Direction
from weightscope.pairs.atlas.prints import Print, make_print
from weightscope.pairs.atlas.store import Store


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    made = make_print(Source.named("embedded"))
    assert made is not None and made[1] == 0  # nothing is fetched of a local file
    return made[0]


def test_a_fingerprint_is_read_as_it_was_made(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    store = Store(tmp_path, 5)
    assert store.get("embedded") is None
    store.put("embedded", arrays)
    kept = store.get("embedded")
    assert kept is not None and kept.outline().is_whole and len(store) == 1
    again = kept.arrays()
    assert all((again[name] == array).all() for name, array in arrays.items())


def test_a_fingerprint_of_other_options_or_another_name_is_not_used(
    arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    store, rows = Store(tmp_path, 5), tmp_path / "rows.toml"
    store.put("embedded", arrays)
    rows.write_text("")
    assert Store(tmp_path, 6).get("embedded") is None
    assert Store(tmp_path, 5, str(rows)).get("embedded") is None
    (path,) = store.folder.glob("print-*.npz")
    path.replace(store._print("other"))
    assert store.get("other") is None
    store.put("embedded", arrays)
    content = bytearray((path := store._print("embedded")).read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert store.get("embedded") is None


def test_a_fingerprint_that_unpacks_to_more_than_its_file_is_not_read(tmp_path: Path) -> None:
    """Compressed zeros, and one member under many names: 100 kB may fill the memory."""
    zeros, shared = io.BytesIO(), io.BytesIO()
    np.savez_compressed(zeros, heads=np.zeros(10_000_000, np.int8))
    with zipfile.ZipFile(shared, "w") as archive:
        for name in ("heads.npy", *(f"{i}.npy" for i in range(9))):
            with archive.open(name, "w") as member:
                np.save(member, np.zeros(1000 if name == "heads.npy" else 1, np.int64))
        for member_info in archive.infolist()[1:]:
            first = archive.infolist()[0]
            for field in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(member_info, field, getattr(first, field))
    for i, attack in enumerate((zeros.getvalue(), shared.getvalue())):
        path = tmp_path / f"{i}.npz"
        path.write_bytes(attack + sha256(b"identity" + attack).digest())
        assert kept_arrays(path, b"identity") is None
    keep_arrays(path, {"heads": np.zeros(1000)}, b"identity")
    kept = kept_arrays(path, b"identity")
    assert kept is not None and kept["heads"].shape == (1000,)


FILE = {"name": "model.safetensors", "size": 5}


@pytest.mark.parametrize(
    "read",
    [
        None, {}, {"name": "x"}, {"files": []}, {"name": "x", "files": [5]}, {"name": 5, "files": []},
        {"name": "x", "files": [{"name": "y"}]}, {"name": "x", "files": [FILE | {"size": "5"}]},
        {"name": "x", "files": [FILE | {"sha256": ["y"]}]}, {"name": "x", "files": [FILE | {"commit": None}]},
        {"name": "x", "files": [FILE | {"size": True}]},
    ],
)  # fmt: skip
def test_a_fingerprint_of_files_that_no_page_can_show_is_refused(arrays: dict[str, np.ndarray], read: object) -> None:
    about = json.loads(arrays["about"].tobytes()) | {"read": read}
    with pytest.raises(CheckpointError, match="with another description"):
        Print.of_arrays(arrays | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}, "x")


def test_a_direction_belongs_to_both_states(tmp_path: Path) -> None:
    store = Store(tmp_path, 5)
    store.put_direction(["a", "1", "b", "1"], Direction("first", "rounding to a grid", "quantised"))
    assert store.direction("a", "1", "b", "1") == Direction("first", "rounding to a grid", "quantised")
    assert store.direction("a", "1", "b", "2") is None


@pytest.mark.parametrize(
    "name, value",
    [
        ("heads", np.zeros((3, 0), np.int32)), ("direct", np.zeros((16, 2, 127), np.int8)),
        ("norms", np.full((16, 2), np.nan, np.float32)), ("blocks", np.zeros((2, 256), np.int64)),
        ("about", np.frombuffer(b"{}", np.uint8)), ("about", np.frombuffer(b"[" * 99_999, np.uint8)),
        ("heads", np.full((3, 16), -1, np.int32)),
    ],
)  # fmt: skip
def test_an_answer_of_a_worker_that_is_no_fingerprint_is_refused(
    arrays: dict[str, np.ndarray], name: str, value: np.ndarray
) -> None:
    with pytest.raises(CheckpointError, match="a worker answers for x with"):
        Print.of_arrays(arrays | {name: value}, "x")
