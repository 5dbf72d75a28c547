"""No dialect of a config gives a silent wrong number: every family reads as transformers does, or refuses and says why.

Every variant of the configs of every model_type is read by `AutoConfig` of transformers and by weightscope. Two
witnesses say what weightscope should read: transformers' own standardised config, whose reading the census proves, and
the frequencies of the rotary module that transformers builds from the variant.
"""

import inspect
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dialects import Values, variants
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.core.errors import CheckpointError
from weightscope.model.config.dialects import in_layer, settings
from weightscope.model.config.reading import part_of
from weightscope.model.layers.read_layer import rotation_of
from weightscope.model.layers.rotation import Rotation
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES

torch = pytest.importorskip("torch", reason="rotary modules are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="configs are read by transformers, which is not installed")

pytestmark = pytest.mark.check

FAR = 100_000  # positions, beyond what any config was trained on
LAYERS = 8  # looked at, among which every class's own layer types are
READ = {"head_dim", "attention_head_size"}  # by code, where they are there, though the class has them not


def reading(values: Values, row: Family) -> tuple[dict[str, Any], dict[str, Rotation]]:
    """The numbers that weightscope has from a config, by name, and the rotation of each type of layer."""
    checkpoint = Checkpoint(Path(), (), {}, Config(values, "config.json"), "config.json")
    meant = settings(checkpoint.config, part_of(checkpoint, row), row)
    row = meant.family
    if row.refused:
        raise CheckpointError(row.refused, file="config.json")
    model = meant.numbers
    numbers: dict[str, Any] = {
        name: getattr(model, name) for name in ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim")
    }
    if any(norm and norm.eps is None for norm in (row.norms.before, row.norms.after)):
        numbers["norm_eps"] = model.norm_eps
    numbers["attention"] = tuple(meant.attends(index) for index in range(model.n_layers))
    rotations: dict[str, Rotation] = {}
    for index in range(min(LAYERS, model.n_layers)):
        if not meant.attends(index):
            continue
        inner, layer_row = in_layer(model, row, index)
        numbers[f"heads {index}"] = inner.n_heads, inner.n_kv_heads, inner.head_dim
        numbers[f"row {index}"] = layer_row
        numbers[f"scale {index}"] = layer_row.scores.scale(inner, index)
        for step in layer_row.steps:
            if hasattr(step, "takes"):
                numbers[f"{step.name} {index}"] = str(step.takes(inner, index))
        rotation = rotation_of(model, row, index)
        numbers[f"rotates {index}"] = rotation is not None
        if isinstance(rotation, Rotation):
            numbers |= {f"{name} {index}": value for name, value in turning(rotation).items()}
            if type(rotation) is Rotation:
                rotations.setdefault(model.layer_types[index], rotation)
    return numbers, rotations


def turning(rotation: Rotation) -> dict[str, Any]:
    """What a rotation does: its frequencies near and far, and how they are laid out."""
    kept = {name: getattr(rotation, name) for name in ("interleaved", "start", "factor", "blocks", "axes")}
    far = rotation.stretched(FAR) if rotation.stretched else rotation.frequencies
    return {**kept, "frequencies": rotation.frequencies, "far": far}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=1e-5, atol=0))
    return bool(np.isclose(a, b, rtol=1e-9)) if isinstance(a, float) and isinstance(b, float) else a == b


def unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The first number in which two readings differ; empty where none does."""
    return next((f"{k}: {a.get(k)} for {b.get(k)}" for k in {**a, **b} if not same(a.get(k), b.get(k))), "")


def subjects() -> Iterator[tuple[str, Family]]:
    """Every model_type of the built-in table that transformers has a config of, with each of its rows."""
    for row in FAMILIES:
        for kind in row.types:
            if kind in transformers.CONFIG_MAPPING:
                yield kind, row


@lru_cache(None)
def saved(kind: str) -> Any:
    """A class's default config."""
    return transformers.CONFIG_MAPPING[kind]()


def within(config: Any, path: str) -> Any:
    for key in path.split(".") if path else ():
        config = config[key] if isinstance(config, dict) else getattr(config, key)
    return config


def plain(config: Any) -> Values:
    return json.loads(config.to_json_string(use_diff=False))


def known(values: Values, base: Values) -> Values:
    """What a standardised config has under the keys of its class: others are read by nothing."""
    return {
        key: known(value, base[key]) if isinstance(value, dict) and "model_type" in value else value
        for key, value in values.items()
        if key in base or key in READ
    }


@lru_cache(None)
def rotary_class(kind: str, config_class: type) -> Any:
    """The rotary module that transformers makes of a config alone; None where there is not exactly one."""
    module = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        modeling = import_module(module)
    except ImportError:
        return None
    classes = [
        made for name, made in vars(modeling).items()
        if inspect.isclass(made) and "Rotary" in name and issubclass(made, torch.nn.Module)
        and made.__module__ == module and "config" in inspect.signature(made.__init__).parameters
    ]  # fmt: skip
    exact = [
        made
        for made in classes
        if inspect.signature(made.__init__).parameters["config"].annotation in (config_class, config_class.__name__)
    ]
    classes = exact if len(classes) > 1 else classes
    return classes[0] if len(classes) == 1 else None


def turned(kind: str, config: Any) -> dict[str, tuple[np.ndarray, float]] | None:
    """Frequencies and the factor of cos and sin of the module that transformers builds, by layer type, "" for all."""
    made = rotary_class(kind, type(config))
    if made is None:
        return None
    module = made(config)
    numbers_seen = {}
    for name, frequencies in module.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            stem = name.removesuffix("inv_freq").rstrip("_")
            factor = getattr(module, f"{stem}_attention_scaling" if stem else "attention_scaling", 1.0)
            numbers_seen[stem] = (frequencies.numpy(), float(factor))
    return numbers_seen


def judged(kind: str, row: Family, every: int = 1, first: int = 0) -> Iterator[tuple[str, str, str]]:
    """(variant, verdict, why) of every variant of a type's config, or of one in `every` from the first on."""
    try:
        base = plain(saved(kind))
    except Exception:
        return
    path = row.part if row.part and isinstance(base.get(row.part.split(".")[0]), dict) else ""
    part_class = type(within(saved(kind), path))
    synonyms = dict(getattr(part_class, "attribute_map", {}))
    rotates = row.rope is not None or any("rope" in str(when.cells) for when in row.when)
    for name, values in islice(variants(base, path, synonyms, rotates), first % every, None, every):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(values)))
                part = within(config, path)
                if rotates and getattr(part, "rope_parameters", None):
                    part.standardize_rope_params()  # as building a model does
                turns = turned(kind, part) if rotates and not getattr(row.rope, "thetas", "") else None
                standard = known(plain(config), base)
            except Exception:  # whatever transformers raises: there is no truth to compare with
                yield name, "no truth", ""
                continue
        try:
            numbers, rotations = reading(values, row)
        except CheckpointError as error:
            yield name, "refused", str(error)
            continue
        try:
            difference = unlike(numbers, reading(standard, row)[0])
        except CheckpointError as error:
            difference = f"read, and its standard form is not: {error}"
        for layer_type, rotation in rotations.items() if turns and not difference else ():
            expected = turns.get(layer_type, turns.get(""))
            if expected is None:
                continue
            frequencies, factor = expected
            if not same(rotation.factor, factor):
                difference = f"factor of {layer_type}: {rotation.factor} for {factor}"
            elif not same(np.sort(np.abs(rotation.frequencies)), np.sort(frequencies)):
                difference = f"{layer_type} turns by {rotation.frequencies[:3]} for {frequencies[:3]}"
        yield name, "wrong" if difference else "equal", difference


def counted(every: int) -> tuple[Counter[str], list[str]]:
    """How many variants are equal, refused, wrong, or have no truth, and the wrong ones; one in `every` is tried."""
    tally: Counter[str] = Counter()
    wrong = []
    for number, (kind, row) in enumerate(subjects()):
        for name, verdict, why in judged(kind, row, every, number):
            tally[verdict] += 1
            if verdict == "wrong":
                wrong.append(f"{kind} ({row.name}), {name}: {why}")
    return tally, wrong


def test_a_sample_of_all_dialects_in_every_family_reads_as_transformers_does_or_is_refused() -> None:
    """One variant in eight of every type, another eighth for each."""
    tally, wrong = counted(8)
    assert not wrong, "\n".join(wrong)
    assert tally["equal"] > 3000 and tally["refused"] < tally["equal"] / 2, tally


@pytest.mark.census
def test_all_dialects_in_every_family_read_as_transformers_does_or_are_refused() -> None:
    tally, wrong = counted(1)
    print(tally)
    assert not wrong, "\n".join(wrong)
    assert tally["equal"] > 30000 and tally["refused"] < tally["equal"] / 2, tally


EAGER = {  # variants whose models are run: what each adds to a config, by model_type; None takes a key away
    "qwen3": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    "llama": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 37.0},
    "gptj": {"rope_parameters": {"rope_theta": 37.0}},
    "minimax_m2": {"rotary_dim": 12, "rope_parameters": None},
    "deberta-v2": {"relative_attention": True, "pos_att_type": "p2p|c2p", "position_buckets": 8,
                   "max_relative_positions": 12},
}  # fmt: skip


@pytest.mark.parametrize("kind", EAGER)
def test_the_eager_model_of_a_mixed_config_is_read_exactly(kind: str, tmp_path: Path) -> None:
    from tests.census.judge import judge, readings
    from weightscope.adopting.comparison import Stored
    from weightscope.adopting.config_keys import tiny_config
    from weightscope.adopting.tiny_models import PLANS, SIZES
    from weightscope.adopting.trial import FAR, at_work

    torch.set_num_threads(1)
    tiny = plain(tiny_config(saved(kind), SIZES[0], PLANS[0]))
    values = {key: value for key, value in {**tiny, **EAGER[kind]}.items() if value is not None}
    config = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(values)))
    model, observed = at_work(config, SIZES[:1], 3, FAR)
    model.save_pretrained(tmp_path)
    sizes = json.loads((tmp_path / "config.json").read_text())
    stated = {key: value for key, value in {**values, **sizes, **EAGER[kind]}.items() if value is not None}
    if "rope_parameters" in EAGER[kind] and EAGER[kind]["rope_parameters"] is None:
        stated.pop("rope_parameters", None)
    elif "rope_parameters" in tiny:
        stated["rope_parameters"] = tiny["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    verdicts = judge(observed, Stored(model, tmp_path), *readings(tmp_path))
    assert [verdict.verdict for verdict in verdicts] == ["exact"], verdicts
