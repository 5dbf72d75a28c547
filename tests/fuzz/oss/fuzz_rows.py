"""A file of rows, as `adopt` saves it and `--families` takes it, and a config.json of the model to read by it."""

import shutil
from pathlib import Path

from tests.fuzz.oss import harness
from weightscope.model.model import open_model
from weightscope.model.rows.stanzas import read_rows
from weightscope.model.rows.table import FAMILIES

LLAMA = Path(__file__).parents[2] / "model" / "rows" / "fixtures" / "llama"


def meet(folder: Path, content: bytes) -> int:
    """Read the rows, and a tiny Llama by them, down to a head's matrices."""
    text, config = [*content.split(harness.BETWEEN), b""][:2]
    rows = folder / "rows.toml"
    rows.write_bytes(text)
    read = read_rows(rows, FAMILIES.row)
    if not (folder / "model.safetensors").exists():
        shutil.copy(LLAMA / "model.safetensors", folder)
    (folder / "config.json").write_bytes(config or (LLAMA / "config.json").read_bytes())
    model = open_model(folder, families=rows)
    assert model.layer(model.attention_layers[0]).head(0) is not None
    return len(read)


if __name__ == "__main__":
    harness.fuzz(meet, "weightscope.model.rows", "weightscope.model.config")
