"""Steps: rare mechanisms, each known from its file alone."""

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.steps import Place, Reads, Step, step_classes
from weightscope.model.layers.steps.gates import Gate
from weightscope.model.layers.steps.scores import Clip, Softcap
from weightscope.model.rows import stanzas
from weightscope.model.rows.cells import LayerTensors
from weightscope.model.rows.family import Family
from weightscope.model.rows.stanzas import read_rows
from weightscope.model.rows.table import FAMILIES

PARALLEL = {
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}, False),
    "gpt_neox": ("gpt_neox", {"use_parallel_residual": True}, True),
    "falcon, one after the other": ("falcon", {"parallel_attn": False}, False),
    "falcon": ("falcon", {}, True),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}, True),
    "stablelm": ("stablelm", {}, False),
    "codegen": ("codegen", {}, True),
    "cohere2": ("cohere2", {}, True),
    "cohere2_moe": ("cohere2_moe", {}, True),
    "cohere_compass": ("cohere_compass_text", {}, True),
    "llama": ("llama", {}, False),
}


def row_of(name: str) -> Family:
    return next(row for row in FAMILIES if row.name == name)


LLAMA = row_of("llama")


def test_every_step_of_a_row_is_found_by_its_name() -> None:
    used = {type(step) for row in FAMILIES for step in row.steps}
    used |= {type(cell) for row in FAMILIES for when in (*row.when, *row.in_) for cell in when.cells.values()}
    known = step_classes()
    assert {step for step in used if hasattr(step, "place")} == set(known.values())
    assert all(is_dataclass(step) and step.place in Place and step.name == name for name, step in known.items())


@pytest.mark.parametrize("name", step_classes())
def test_a_step_is_exact_or_says_what_it_leaves_out(name: str) -> None:
    step = step_classes()[name]
    assert step.exact == (step.caveat is Step.caveat)


@dataclass(frozen=True)
class Faulty(Step):
    """A step whose subclasses forget something."""

    place = Place.VECTORS

    tensor: str

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        return layer

    def caveat(self, layer: Layer) -> str:
        return "a factor"


class Complete(Faulty):
    """A step that forgets nothing."""


class Mute(Faulty):
    """A step that is not exact, without a caveat."""

    caveat = Step.caveat


class Idle(Faulty):
    """A step that lists a tensor as read and applies nothing."""

    apply = Step.apply


class Unlisted(Faulty):
    """A step that does not list its tensor as read."""

    reads = Step.reads


class Claiming(Step):
    """A step that calls itself exact and applies nothing."""

    place = Place.VECTORS
    exact = True


FAULTS = {
    "mute = 'attn.t'": "it is neither exact nor has a caveat",
    "idle = 'attn.t'": "nothing reads 'attn.t'",
    "unlisted = 'attn.t'": "nothing reads 'attn.t'",
    "claiming = true": "it is exact and applies nothing",
    "complete = ''": "it names nothing to apply",
    "sinks = ''": "it names nothing to apply",
    "clip = []": "it names nothing to apply",
    "multipliers = true": "it names nothing to apply",
    "multipliers = { key = '' }": "it names nothing to apply",
    "added_positions = { to = [] }": "it names nothing to apply",
}


def row_with(step: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The row of a file with this step, where the steps of this module are known."""
    kinds = {kind.__name__.lower(): kind for kind in (Complete, Mute, Idle, Unlisted, Claiming)}
    for name, kind in kinds.items():
        monkeypatch.setattr(kind, "name", name, raising=False)
    monkeypatch.setattr(stanzas, "step_classes", lambda: {**step_classes(), **kinds})
    path.write_text(f"[novel]\nlike = 'llama'\nsteps.{step}\n")
    return read_rows(path, FAMILIES.row)[0]


@pytest.mark.parametrize("step", FAULTS)
def test_row_with_a_step_that_says_or_does_nothing_is_refused(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError) as error:
        row_with(step, tmp_path / "rows.toml", monkeypatch)
    place = f"rows.toml: line 3: [novel] steps.{step.partition(' ')[0]}: "
    assert str(error.value).startswith(place + FAULTS[step])


def test_row_with_a_complete_step_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_with("complete = 'attn.t'", tmp_path / "rows.toml", monkeypatch)
    assert row.steps == (Complete("attn.t"),) and "attn.t" in row.lone


def test_a_row_has_one_step_of_a_name() -> None:
    for row in FAMILIES:
        names = [step.name for step in row.steps]
        assert len(names) == len(set(names)), row.name


def test_a_step_is_added_replaced_and_removed_by_its_name() -> None:
    capped = LLAMA.but(steps__softcap=Softcap("cap"), steps__gate=Gate("gate"))
    assert capped.steps == (Softcap("cap"), Gate("gate"))
    assert capped.but(steps__softcap=Softcap("other")).steps == (Softcap("other"), Gate("gate"))
    assert capped.but(steps__softcap=None).steps == (Gate("gate"),)
    with pytest.raises(ValueError, match="steps__gate was given the step 'clip'"):
        LLAMA.but(steps__gate=Clip(("bound",)))


def test_what_a_step_reads_is_what_its_row_reads() -> None:
    row = LLAMA.but(steps__gate=Gate("self_attn.gate", of_heads="self_attn.bias"))
    assert "self_attn.gate" in row.modules and "self_attn.bias" in row.lone
    assert {cell.name for cell in fields(Family)}.isdisjoint(step_classes())


@pytest.mark.parametrize("case", PARALLEL)
def test_parallel_follows_the_configured_row(case: str) -> None:
    name, config, parallel = PARALLEL[case]
    row = row_of(name)
    assert row.configured({**row.config.defaults, **config}).parallel is parallel


def test_roles_name_every_module_once() -> None:
    roles = row_of("phi3").roles
    assert roles["q+k+v"] == "self_attn.qkv_proj" and roles["gate+up"] == "mlp.gate_up_proj"
    assert (roles["tokens"], roles["norm.outputs"], roles["unembedding"]) == ("embed_tokens", "norm", "lm_head")
    assert row_of("qwen3").roles["q_norm"] == "self_attn.q_norm" and "positions" not in roles
    assert row_of("bert").roles["norm.after"] == "output.LayerNorm"
