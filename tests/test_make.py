"""What a target of make is given reaches it, or is refused: a name that changes nothing passes for one that does."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PHONY = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", MAKEFILE, re.M)
TARGETS = [] if PHONY is None else PHONY[1].replace("\\\n", " ").split()
ANALYSIS = re.search(r"^ANALYSIS := (.*)", MAKEFILE, re.M)
TAKES = {
    target: names.replace("$(ANALYSIS)", ANALYSIS[1]).split()
    for target, names in re.findall(r"^TAKES_(\S+) := (.*)", MAKEFILE, re.M)
    if ANALYSIS is not None
}


def would_run(*words: str) -> subprocess.CompletedProcess[str]:
    """As on a command line of its own, also where make runs the tests and tells a make within it what it was told."""
    own = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, env=own)


@pytest.mark.parametrize("target", TARGETS)
def test_a_name_that_a_target_does_not_take_ends_it_with_those_it_takes(target: str) -> None:
    for name in ("SOURCE", *({"MODEL", "IMAGES", "OLD"} - set(TAKES.get(target, ())))):
        refused = would_run(target, f"{name}=x")
        assert refused.returncode == 2 and not refused.stdout
        assert f"{target} takes no {name}=; it takes {''.join(f'{own}= ' for own in TAKES.get(target, ()))}PYTHON" in (
            refused.stderr
        )


@pytest.mark.parametrize("target", TAKES)
def test_what_a_target_takes_reaches_its_command(target: str) -> None:
    assert target in TARGETS
    for name in TAKES[target]:
        given = would_run(target, f"{name}=of-mine", "PYTHON=python3")
        assert given.returncode == 0 and "of-mine" in given.stdout
    assert would_run(target).returncode == 0
