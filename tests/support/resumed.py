"""A plugin of pytest that leaves out tests that passed before: `-p tests.support.resumed`, RESUMED=FILE names them."""

import os
from pathlib import Path

import pytest

LIST = Path(os.environ.get("RESUMED", "out/long/passed.txt"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PASSED] = {*LIST.read_text().splitlines()} if LIST.exists() else set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = config.stash[PASSED]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and report.when == "call" and report.passed:
        LIST.parent.mkdir(parents=True, exist_ok=True)
        with LIST.open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


PASSED = pytest.StashKey[set[str]]()
