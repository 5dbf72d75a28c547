"""Seventy further tensors that look like another model's: the model's own are read, and the others never pass for them.

Each decoy has the names and shapes of a stack of its own, and finite values; config.json stays as it is.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from benchmarks.synthetic import Sizes, write

Weights = dict[str, np.ndarray]
LAYERS = 3
OWN = Sizes(layers=LAYERS, inner=96)


def drawn(seed: int, like: Weights) -> Weights:
    rng = np.random.default_rng(seed)
    return {name: (0.05 * rng.standard_normal(w.shape)).astype(np.float32) for name, w in like.items()}


def stack(count: int, like: Weights) -> Weights:
    """The tensors of so many layers after the model's own, and of its ends."""
    layers: Weights = {}
    for i in range(count):
        of_layer = {name: w for name, w in like.items() if name.startswith("model.layers.0.")}
        layers |= {name.replace(".0.", f".{i}.", 1): w for name, w in of_layer.items()}
    ends = {name: w for name, w in like.items() if ".layers." not in name}
    return drawn(7, layers | ends)


def behind(prefix: str, layers: int = 8) -> Callable[[Weights], Weights]:
    return lambda real: {f"{prefix}{name}": w for name, w in stack(layers, real).items()}


def further_layers(real: Weights) -> Weights:
    new = stack(11, real)
    return {name: w for name, w in new.items() if any(f".layers.{i}." in name for i in range(LAYERS, 11))}


def ending(words: str) -> Callable[[Weights], Weights]:
    """Each matrix, and three copies of it."""
    return lambda real: {f"{name}{words}{i}": w for i in range(3) for name, w in drawn(8 + i, real).items()}


def within(words: str) -> Callable[[Weights], Weights]:
    """Three copies of each matrix of attention one module deeper."""
    return lambda real: {
        name.replace("self_attn.", f"self_attn.{words}{i}."): w
        for i in range(8) for name, w in drawn(8 + i, real).items() if "self_attn." in name
    }  # fmt: skip


DECOYS: dict[str, Callable[[Weights], Weights]] = {
    "a draft model": behind("draft_model."),
    "a name that sorts first": behind("a."),
    "an average": behind("ema."),
    "the same words twice": behind("model."),
    "a model in the model": behind("model.model."),
    "without the model's prefix": lambda real: {n.removeprefix("model."): w for n, w in stack(8, real).items()},
    "a teacher": behind("teacher.language_model."),
    "as many layers, three times": lambda real: {
        f"copy{i}.{name}": w for i in range(3) for name, w in drawn(9 + i, real).items()},
    "further layers": further_layers,
    "backups": ending(".backup"),
    "within": within("original"),
}  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, dict[str, object]]:
    folder = write(tmp_path_factory.mktemp("own"), OWN)
    weights = drawn(0, load_file_as_float32(folder))
    return weights, json.loads((folder / "config.json").read_text())


def load_file_as_float32(folder: Path) -> Weights:
    model = ws.open_model(folder)
    return {name: model.checkpoint[name].read() for name in model.checkpoint}


def saved(folder: Path, weights: Weights, config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.check
@pytest.mark.parametrize("decoy", DECOYS)
def test_decoys_are_not_read_for_the_model(decoy: str, real: tuple[Weights, dict[str, object]], tmp_path: Path) -> None:
    weights, config = real
    more = DECOYS[decoy](weights)
    assert len(more) >= 70
    plain = saved(tmp_path / "plain", weights, config)
    with_decoys = saved(tmp_path / "decoys", weights | more, config)
    try:
        model = ws.open_model(with_decoys)
        for i in range(LAYERS):
            mine, theirs = model.layer(i), ws.open_model(plain).layer(i)
            for part in ("q", "k", "v"):
                np.testing.assert_array_equal(getattr(mine, part).of(0)[0], getattr(theirs, part).of(0)[0])
        assert ws.same(plain, with_decoys).verdict in ("different", "undecided")
        assert ws.identity(plain).wsid != ws.identity(with_decoys).wsid
    except ws.CheckpointError as error:  # whatever reads neither lies about neither
        assert str(error).isprintable()


@pytest.mark.census
@pytest.mark.parametrize("decoy", DECOYS)
def test_model_that_only_the_decoys_hold_is_another(
    decoy: str, real: tuple[Weights, dict[str, object]], tmp_path: Path
) -> None:
    """The model's own tensors are drawn anew, and the decoys have the values of the original's."""
    weights, config = real
    more = DECOYS[decoy](weights)
    names = dict(zip(more, weights, strict=False))
    hidden = {name: weights[names[name]] if name in names and w.shape == weights[names[name]].shape else w
              for name, w in more.items()}  # fmt: skip
    plain = saved(tmp_path / "plain", weights, config)
    swapped = saved(tmp_path / "swapped", drawn(3, weights) | hidden, config)
    try:
        verdicts = {ws.same(plain, swapped).verdict, ws.same(swapped, plain).verdict}
    except ws.CheckpointError as error:
        assert str(error).isprintable()
    else:
        assert verdicts == {"different"}
