"""Environments of a test's own, with packages that this one lacks; the test skips where they cannot be had."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(folder: Path, *requirements: str, alone: bool = False) -> Path:
    """The Python of a new environment with these packages and the checkout; with all of this one too unless `alone`."""
    made = folder / "environment"
    venv.create(made, with_pip=False)
    python = made / "bin" / "python"
    install(python, *requirements)
    packages = made / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "others.pth").write_text("\n".join([str(ROOT), *([] if alone else [sysconfig.get_path("purelib")])]))
    return python


def install(python: Path, *requirements: str) -> None:
    """Install packages from the index; skips the test where that cannot be done."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python), "install"]
    try:
        subprocess.run([*pip, *requirements], check=True, capture_output=True, text=True, timeout=600)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{', '.join(requirements)} cannot be installed: {getattr(error, 'stderr', '') or error}")


def run_in(program: Path, *arguments: object, folder: Path, status: int = 0, **variables: str) -> str:
    """What a program prints, run in a folder without the variables of this Python."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=clean | variables, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout
