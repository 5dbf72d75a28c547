"""The runner shows what the model computes, in every family, and puts back an output that it is given."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import CASES, Case, case_of

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")
transformers = pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from tests.support.random_models import inputs_of, random_model  # noqa: E402
from weightscope.core.compute.device import Device  # noqa: E402
from weightscope.core.embedded import FOLDER as EMBEDDED  # noqa: E402
from weightscope.model.layers.maps import Affine  # noqa: E402
from weightscope.runner import Activations, Runner, open_runner  # noqa: E402
from weightscope.runner.hooks import tower_of  # noqa: E402
from weightscope.runner.runner import batches  # noqa: E402

pytestmark = pytest.mark.check

TOKENS = [np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6]), np.array([5, 3, 5, 8, 9])]


@pytest.fixture(scope="module")
def embedded() -> Runner:
    return open_runner(ws.open_model(EMBEDDED), language=True)


# Why some are refused, in a line, until the runner knows how transformers runs them.
NOT_RUN = {
    "squeezebert": "cannot be watched",
    "videomae": "texts are whole numbers",
    "beit": "has no list of 2 layers",
    "granite_speech": "texts are whole numbers",
    "swin": "tower to run alone",
    **dict.fromkeys(
        (
            "qwen3_vl_vision", "kimi_k25_vision", "minimax_m3_vl_vision", "llama4_vision", "gemma4_vision",
            "sam_vision", "sam3_vit", "step3p5_vision", "pixtral", "t5_encoder", "t5_decoder",
        ),
        "tower to run alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NOT_RUN], ids=lambda case: case.name)
def test_models_that_cannot_be_run_are_refused(case: Case, tmp_path: Path) -> None:
    network = random_model(case)
    network.save_pretrained(tmp_path)
    model = ws.open_model(tmp_path, tower=case.tower or None)
    inputs = inputs_of(case)
    with pytest.raises(ws.CheckpointError, match=NOT_RUN[case.name]):
        Runner(model, tower_of(network, model)).observe([next(iter(inputs.values()))[0].numpy()], lambda seen: None)


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in NOT_RUN], ids=lambda case: case.name)
def test_every_family_shows_every_attention_layer(case: Case, tmp_path: Path) -> None:
    """Each layer once and in order; `observe` itself compares every output with alpha f(x) + b_O."""
    network = random_model(case)
    network.save_pretrained(tmp_path)
    model = ws.open_model(tmp_path, tower=case.tower or None)
    runner = Runner(model, tower_of(network, model))
    inputs = inputs_of(case)
    given = inputs["input_ids"] if "input_ids" in inputs and case.tower != "vision" else inputs["pixel_values"]
    seen: list[Activations] = []
    runner.observe([given[0].numpy()], seen.append)
    assert [each.layer.index for each in seen] == list(model.attention_layers)
    for each in seen:
        output = each.layer.output(each.attention[0], each.x[0])
        np.testing.assert_allclose(output, each.output[0], atol=1e-4 * np.abs(each.output).max())


def test_activations_match_transformers(embedded: Runner) -> None:
    seen: list[Activations] = []
    embedded.observe(TOKENS[:1], seen.append)
    with torch.no_grad():
        result = embedded.network(
            torch.from_numpy(TOKENS[0])[None], output_hidden_states=True, output_attentions=True, use_cache=False
        )
    for each in seen:
        np.testing.assert_array_equal(each.x[0], result.hidden_states[each.layer.index][0].numpy())
        np.testing.assert_array_equal(each.attention[0], result.attentions[each.layer.index][0].numpy())


def test_only_wanted_layers_are_run(embedded: Runner) -> None:
    seen: list[int] = []
    later: list[int] = []
    handle = embedded.blocks[1].register_forward_hook(lambda *_: later.append(1))
    try:
        embedded.observe(TOKENS, lambda each: seen.append(each.layer.index), layers=[0])
    finally:
        handle.remove()
    assert set(seen) == {0}
    assert not later


def test_batches_hold_every_sequence_once_and_one_length_each() -> None:
    made = batches(TOKENS, tokens_a_batch=5)
    assert sorted(int(i) for batch in made for i in batch.inputs) == [0, 1, 2]
    for batch in made:
        for index, row in zip(batch.inputs, batch.arrays, strict=True):
            np.testing.assert_array_equal(row, TOKENS[index])
    assert all(batch.arrays.size <= 5 for batch in made)


def test_losses_match_transformers(embedded: Runner) -> None:
    losses = embedded.losses(TOKENS)
    for tokens, loss in zip(TOKENS, losses, strict=True):
        ids = torch.from_numpy(tokens)[None]
        with torch.no_grad():
            mean = float(embedded.network(ids, labels=ids).loss)
        assert loss == pytest.approx(mean * (len(tokens) - 1), rel=1e-5)


def test_replacing_an_output_by_itself_changes_nothing(embedded: Runner) -> None:
    plain = embedded.losses(TOKENS)
    np.testing.assert_allclose(embedded.losses(TOKENS, lambda seen: seen.output), plain, rtol=1e-6)
    assert np.abs(embedded.losses(TOKENS, lambda seen: 0 * seen.output) - plain).min() > 0.01


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_neox", "bloom", "dinov2"])
def test_a_replaced_output_reaches_the_next_layer(name: str, tmp_path: Path) -> None:
    """Whether W_O is inside the attention module or after it: layer 1 sees the difference."""
    case = case_of(name)
    network = random_model(case)
    network.save_pretrained(tmp_path)
    runner = Runner(ws.open_model(tmp_path), network)
    inputs = inputs_of(case)
    given = [next(iter(inputs.values()))[0].numpy()]
    seen: dict[int, np.ndarray] = {}

    def plain(each: Activations) -> None:
        seen[each.layer.index] = each.x.copy()

    def moved(each: Activations) -> np.ndarray:
        if each.layer.index == 1:
            seen[2] = each.x.copy()
        return 2 * each.output

    runner.observe(given, plain)
    runner._checked.clear()
    runner.observe(given, moved, layers=[0, 1])
    assert np.abs(seen[2] - seen[1]).max() > 1e-3


def test_a_block_that_shows_no_attention_is_named(embedded: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does whose projection has a name that the family's row does not know."""
    elsewhere = replace(embedded.model.reading.settings, family=embedded.model.family.but(heads__out="attn.elsewhere"))
    reading = replace(embedded.model.reading, settings=elsewhere)
    monkeypatch.setattr(embedded.model, "reading", reading)
    with pytest.raises(ws.CheckpointError, match="layer 0: transformers' GPT2Block does not show its attention"):
        embedded.observe(TOKENS, lambda seen: None)


def test_a_network_without_the_familys_layers_is_refused(embedded: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(embedded.model.reading.settings, family=embedded.model.family.but(layer="layers.{i}."))
    reading = replace(embedded.model.reading, settings=elsewhere)
    monkeypatch.setattr(embedded.model, "reading", reading)
    with pytest.raises(ws.CheckpointError, match="transformers' GPT2LMHeadModel has no list of 4 layers"):
        Runner(embedded.model, embedded.network)


def test_wrong_weights_are_detected(embedded: Runner) -> None:
    runner = Runner(embedded.model, embedded.network)
    runner.layers[1] = replace(runner.layers[1], w_o=runner.layers[1].w_o * np.float32(1.001))
    with pytest.raises(ws.CheckpointError, match="layer 1: attention's output differs from what its weights give"):
        runner.observe(TOKENS, lambda each: None)


def test_one_token_does_not_count_as_a_check(embedded: Runner) -> None:
    """Alone, a token gets all attention from every head, so heads that were exchanged would go unseen."""
    runner = Runner(embedded.model, embedded.network)
    layer = runner.layers[0]
    v = Affine(layer.v.w[::-1], layer.v.b[::-1])
    runner.layers[0] = replace(layer, v=v, w_o=np.asarray(layer.w_o)[::-1])
    with pytest.raises(ws.CheckpointError, match="layer 0: attention's output differs"):
        runner.observe([TOKENS[0][:1], *TOKENS], lambda each: None)


def test_a_checkpoint_without_all_parameters_is_not_run() -> None:
    folder = Path(__file__).parents[1] / "model" / "rows" / "fixtures" / "llama"
    with pytest.raises(ws.CheckpointError, match=r"llama: lacks \d+ parameters, '.*' the first"):
        open_runner(ws.open_model(folder))


def test_a_card_without_room_is_one_error(embedded: Runner) -> None:
    def fill_up(seen: Activations) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    with pytest.raises(
        ws.CheckpointError, match="the device has no room for 2 texts of 5 tokens in addition to the model"
    ):
        embedded.observe([TOKENS[0], TOKENS[2]], fill_up)


def test_a_model_larger_than_the_card_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(module: torch.nn.Module, where: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(ws.CheckpointError, match="the device has no room for the model"):
        open_runner(ws.open_model(EMBEDDED))


def test_losses_without_room_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    runner = open_runner(ws.open_model(EMBEDDED), language=True)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", full)
    with pytest.raises(ws.CheckpointError, match="the device has no room for the losses of 1 text of 5 tokens"):
        runner.losses([TOKENS[0]])


def test_weightscopes_errors_are_not_blamed_on_transformers(embedded: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runner: Runner, seen: Activations) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Runner, "check", broken)
    with pytest.raises(ValueError, match=r"^a bug$"):
        embedded.observe([TOKENS[0]], lambda seen: None)


def test_an_unreachable_device_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy may see one that PyTorch, built for processors alone, does not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("weightscope.runner.runner.open_device", lambda name: Device(name, np))
    with pytest.raises(ws.CheckpointError, match=r"^device cuda: PyTorch 2\S* sees no CUDA device"):
        open_runner(ws.open_model(EMBEDDED), device="cuda")


@pytest.mark.parametrize(
    "text, says",
    [
        (np.array([1, 999_999]), "text 1 has token 999999; the vocabulary has 8000"),
        (np.array([-1, 2]), "text 1 has token -1; the vocabulary has 8000"),
        (np.array([], int), r"text 1 has int64 of shape \(0,\); texts are whole numbers of shape \(n,\)"),
        (np.array([0.5, 1.0]), "text 1 has float64 of shape"),
        (np.arange(300), r"transformers cannot run it on an input of shape \(300,\): "),
    ],
)
def test_texts_that_the_model_cannot_take_are_one_error(text: np.ndarray, says: str, embedded: Runner) -> None:
    for run in (lambda texts: embedded.observe(texts, lambda seen: None), embedded.losses):
        with pytest.raises(ws.CheckpointError, match=says):
            run([TOKENS[0], text])


def test_errors_of_observers_pass_through(embedded: Runner) -> None:
    def wrong(seen: Activations) -> None:
        raise IndexError("my own")

    with pytest.raises(IndexError, match="my own"):
        embedded.observe(TOKENS, wrong)
