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
from datetime import datetime
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.environments import environment, install
from tests.support.hub_server import Hub
from tests.support.tiny_models import fixture

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROSE = [*ROOT.glob("*.md"), *(p for name in ("analyses", "docs", "weightscope") for p in (ROOT / name).rglob("*.md"))]
CODE = [path for folder in ("weightscope", "analyses", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
# What pip would fetch from an index: `weightscope` there is a stranger's.
LARGEST_WHEEL = 8_600_000  # bytes; the embedded checkpoint takes four fifths
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


def build(folder: Path, epoch: int = 1_700_000_000) -> Path:
    """The wheel, made in a folder from a copy of the sources: a build leaves its folders in the tree that it builds."""
    source = folder / "source"
    shutil.copytree(ROOT / "weightscope", source / "weightscope", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-deps"]
    options = ["--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *options], check=True, env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch)})
    (wheel,) = folder.glob("weightscope_attention-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.mark.check
def test_the_wheel_can_be_built_again_byte_for_byte(wheel: Path, tmp_path: Path) -> None:
    again = build(tmp_path)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()
    assert wheel.stat().st_size < LARGEST_WHEEL


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands' folder of an environment that has our wheel, and of this one the other packages.

    A .pth line adds this environment's packages without what its own .pth files say, an editable weightscope for one.
    """
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
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


@pytest.mark.check
def test_the_command_of_the_hub_runs_ours_as_its_extension(installed: Path, tmp_path: Path) -> None:
    """As `hf extensions install` leaves it, with this wheel in place of a repository's."""
    extensions = pytest.importorskip("huggingface_hub.cli.extensions", reason="this hf has no extensions")
    folder = tmp_path / ".local" / "share" / "hf" / "extensions" / "hf-weightscope"
    program = installed / "hf-weightscope"
    about = {"owner": "example", "repo": "hf-weightscope", "repo_id": "example/hf-weightscope"}
    about |= {"short_name": "weightscope", "executable_path": str(program), "type": "python"}
    extensions.ExtensionManifest(**about, installed_at=datetime.now()).save(folder)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables = clean | {"HOME": str(tmp_path), "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    for arguments, status, printed in (
        (["inspect", "embedded"], 0, "checkpoint  model.safetensors: 52 tensors"),
        (["inspect", "nowhere"], 2, "weightscope: nowhere"),
        (["inspect"], 2, "Usage: hf-weightscope inspect"),
    ):
        command = [Path(sysconfig.get_path("scripts")) / "hf", "weightscope", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == status and (done.stdout + done.stderr).startswith(printed), done


@pytest.mark.check
def test_another_project_of_the_name_in_our_folder_is_named(wheel: Path, tmp_path: Path) -> None:
    """PyPI's weightscope, installed before ours: its folder is ours."""
    python = environment(tmp_path, "--no-deps", "weightscope==0.4.3", alone=True)
    install(python, "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    (packages,) = python.parent.parent.glob("lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python.parent / "weightscope", "inspect", "embedded"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    mixed = "files of another project named weightscope are mixed into this installation; remove both"
    assert done.returncode == 0 and done.stderr.startswith(f"weightscope: {mixed}") and done.stderr.count("\n") == 1


@pytest.mark.check
def test_uvx_inspects_a_model_of_the_hub_from_the_wheel(wheel: Path, hub: Hub, tmp_path: Path) -> None:
    """In an environment that uv makes, with our wheel from a folder and the other packages from the index."""
    uv = environment(tmp_path, "uv", alone=True).parent / "uv"
    model = fixture("llama").folder
    hub.repositories["org/model"] = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    variables = {"HF_ENDPOINT": hub.hub, "HF_HOME": str(tmp_path / "hub"), "UV_TOOL_DIR": str(tmp_path / "tools")}
    source = ["--find-links", wheel.parent, "--from", "weightscope-attention==" + ws.__version__]
    command = [uv, "tool", "run", "--python", sys.executable, *source, "weightscope", "inspect", "org/model"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=clean | variables, capture_output=True, text=True, timeout=900
    )
    if "error sending request" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip(f"uv cannot reach the index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checkpoint  org/model: 22 tensors")
    assert not list((tmp_path / "hub").rglob("*.safetensors"))  # headers, no weights
