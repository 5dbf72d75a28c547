"""The wheel, installed away from the checkout, does what the checkout does; no other project has its name."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import weightscope as ws

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROSE = [*ROOT.glob("*.md"), *(p for name in ("analyses", "docs", "weightscope") for p in (ROOT / name).rglob("*.md"))]
CODE = [path for folder in ("weightscope", "analyses", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
# What pip would fetch from an index: `weightscope` there is a stranger's.
STRANGERS = re.compile(r"(install|RUN|==|\bpip\b)[^\n]*['\" ]weightscope(\[|['\" ]|$)")


def test_install_hints_name_known_projects_only() -> None:
    hints = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*PROSE, *CODE]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if STRANGERS.search(line)
    ]
    assert not hints


def test_unknown_project_in_a_hint_is_found() -> None:
    for hint in ("pip install weightscope", "pip install 'weightscope[gguf]'", "RUN pip install weightscope[cluster]"):
        assert STRANGERS.search(hint)
    assert not STRANGERS.search("pip install 'weightscope-attention[gguf]'")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands' folder of an environment that has our wheel, and of this one the other packages.

    A .pth line adds this environment's packages without what its own .pth files say, an editable weightscope for one.
    """
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    source = folder / "source"  # a copy: a build leaves its folders in the tree that it builds
    shutil.copytree(ROOT / "weightscope", source / "weightscope", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*pip, *build, str(source)], check=True)
    (wheel,) = folder.glob("weightscope_attention-*.whl")
    install = ["--python", str(environment), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def run(installed: Path, *arguments: str, folder: Path) -> str:
    """What a command prints, run where nothing of the checkout is in sight."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(installed / arguments[0]), *arguments[1:]], cwd=folder, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.check
def test_the_wheel_is_named_and_typed(installed: Path, tmp_path: Path) -> None:
    script = """
import json, weightscope
from importlib.metadata import metadata, version
from pathlib import Path
package = Path(weightscope.__file__).parent
print(json.dumps([str(package), version("weightscope-attention"), (package / "py.typed").exists()]))
"""
    package, version, typed = json.loads(run(installed, "python", "-c", script, folder=tmp_path))
    assert Path(package).is_relative_to(installed.parent) and typed
    assert version == ws.__version__ and f"version: {version}" in (ROOT / "CITATION.cff").read_text().splitlines()
    assert run(installed, "weightscope", "--version", folder=tmp_path) == f"weightscope, version {version}\n"
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.check
@pytest.mark.parametrize(
    ("command", "table"),
    [
        (["detok", "embedded", "--out", "out"], "heads.csv"),
        (["audit", "embedded", "--out", "out"], "heads.csv"),
        (["circuits", "embedded", "--out", "out"], "roles.csv"),
        (["positions", "embedded", "--out", "out"], "trends.csv"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_of_the_wheel(installed: Path, tmp_path: Path, command: list[str], table: str) -> None:
    run(installed, "weightscope", *command, folder=tmp_path)
    assert (tmp_path / "out" / table).stat().st_size and (tmp_path / "out" / "report.html").exists()


@pytest.mark.check
def test_a_study_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="studies run the model, with the extra `runner`")
    paragraphs = [f"Paragraph {n} is one of many, each of ten words." for n in range(40)]
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs))
    run(installed, "weightscope", "norms", "embedded", "--text", "text.txt", "--out", "out", folder=tmp_path)
    assert (tmp_path / "out" / "heads.csv").exists() and (tmp_path / "out" / "report.html").exists()
