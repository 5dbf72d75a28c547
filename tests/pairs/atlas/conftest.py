"""A small population on the disk: two families, a tree in one of them, a lone checkpoint, and lines that fail."""

from pathlib import Path

import pytest

from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.small_llama import drawn, write_small_llama, written

PLANTED = ("bfloat16", "drift 3 %", "heads permuted", "last layers removed", "4 bits, groups of 32")


@pytest.fixture(scope="session")
def population(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, named for what was done to them, and list.txt."""
    folder = tmp_path_factory.mktemp("population")
    base = read_weights(write_small_llama(folder / "base", layers=5))
    for name in PLANTED:
        write_weights(DERIVATIONS[name].change(base), folder / name.replace(" ", "-"))
    stranger = drawn(base, seed=7)
    written(stranger, folder / "other")
    written(DERIVATIONS["bfloat16"].change(stranger), folder / "other-bfloat16")
    written(drawn(base, seed=8), folder / "alone")
    (folder / "broken").mkdir()
    (folder / "broken" / "model.safetensors").write_bytes(b"<html>please log in</html>")
    names = [*(path.name for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "drawn"), "missing"]
    (folder / "list.txt").write_text("".join(f"{folder / name}\n" for name in names) + f"{folder / 'base'}\n")
    return folder
