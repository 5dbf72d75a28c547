"""What readers.py says of transformers 4.57 and 5 is what their AutoConfig takes from planted files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.model.rows.readers_at_work import FILE, plants
from tests.model.rows.windows_at_work import FILE as WINDOWS
from tests.model.rows.windows_at_work import PLANTS, SIZES
from weightscope.checkpoint.config import Config
from weightscope.model.config.dialects import FULL, SLIDING
from weightscope.model.config.readers import (
    ACTIVATIONS,
    ALL,
    EPS_KEYS,
    FIVE,
    FOUR,
    LLAMA_CPP,
    READERS,
    UNKNOWN,
    VLLM,
    Takes,
    What,
    _ranges,
    _tables,
    disagreements,
    shown,
    taken,
)
from weightscope.model.rows.table import FAMILIES

FACTS = json.loads(FILE.read_text(encoding="utf-8"))
ACTIVATION, BASE, DETAILS, EPS, HEAD = What.ACTIVATION, What.BASE, What.DETAILS, What.EPS, What.HEAD
SCALED, SHARE, TIED, WINDOW, WINDOWED = What.SCALED, What.SHARE, What.TIED, What.WINDOW, What.WINDOWED
TABLES = _tables()
LOCAL = ("rope_local_base_freq", "local_rope_theta")


def row_of(kind: str) -> Any:
    rows = [row for row in FAMILIES if kind in row.types]
    return next((row for row in rows if row.tower in ("text", "decoder", "")), rows[0])


def facts(version: str) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any] | None]]:
    """Type, plant, all that a version takes from a file of sizes alone, and from the planted file."""
    usual: dict[str, Any] = {}
    for kind, name, new in FACTS[version]:
        if name == "nothing":
            usual = new
        gone = (new or {}).get("gone", ())
        yield (
            kind,
            name,
            usual,
            None if new is None else {k: v for k, v in {**usual, **new}.items() if k not in gone and k != "gone"},
        )


def turn(version: str, usual: Mapping[str, Any], asked: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The rotary parameters that AutoConfig gives layers of a kind."""
    if version.startswith("5"):
        given = asked.get("rope_parameters") or {}
        return given.get(kind or FULL, given) or {}
    base = asked["global_rope_theta"] if "global_rope_theta" in usual else asked.get("rope_theta")
    scaling = asked.get("rope_scaling") or {}
    local = next((asked[key] for key in LOCAL if key in usual), None)
    if kind == SLIDING and local is not None:
        base, scaling = local, {}
    return {**scaling, "rope_theta": base, "partial_rotary_factor": asked.get("partial_rotary_factor", 1.0)}


def windowed(version: str, kind: str, usual: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Layers with a window by the types that AutoConfig gives them, where the code goes by these."""
    is_used = "use_sliding_window" not in usual or asked["use_sliding_window"]
    how = next(
        how for how, kinds in TABLES[FOUR if version.startswith("4") else FIVE]["windows"].items() if kind in kinds
    )
    if not is_used or not asked.get("sliding_window"):
        return "none"
    return "all" if how == ALL else _ranges([letter == "s" for letter in asked["layer_types"]])


def wrong(
    version: str, content: Mapping[str, Any], takes: Takes, usual: Mapping[str, Any], asked: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """What a reader is said to take and does not."""
    inner = content.get("text_config", content)
    for (name, kind), value in takes.values.items():
        given = turn(version, usual, asked, kind)
        if name == BASE:
            truth = {given.get("rope_theta")}
        elif name == SCALED and version.startswith("4") and kind == SLIDING:
            continue  # modeling code has it, no config
        elif name == SCALED:
            word = given.get("rope_type", given.get("type", "default"))
            truth = {f"{word} by {given['factor']:g}" if "factor" in given and word != "default" else word}
        elif name == DETAILS:
            continue  # as in the file, under both versions
        elif name == SHARE:
            truth = {given.get("partial_rotary_factor", 1.0)}
        elif name == HEAD:
            if len(row_of(inner["model_type"]).heads.head_dim) > 1:
                continue  # of several keys
            even = [
                inner[a] // inner[b]
                for a in ("hidden_size", "n_embd", "d_model")
                if a in inner
                for b in ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
                if b in inner
            ]
            own = asked.get("head_dim") or (even or [None])[0]
            truth = {own} if "head_dim" in usual else {own, *even}  # any config keeps a key that no code reads
        elif name == EPS:
            truth = {asked[key] for keys in EPS_KEYS.values() for key in keys if key in asked}
        elif name == TIED:
            truth = {asked["tied"]}
        elif name == WINDOW:
            is_used = "use_sliding_window" not in usual or asked["use_sliding_window"]
            truth = {(asked.get("sliding_window") or None) if is_used else None}
        elif name == WINDOWED:
            truth = {windowed(version, inner["model_type"], usual, asked)}
        elif name == ACTIVATION:
            truth = {asked[key] for key in ACTIVATIONS if key in asked}
        if value not in truth:
            yield f"{name} {kind}", value, truth


def differences(version: str, kinds: set[str]) -> tuple[int, int, list[Any]]:
    """Values compared, files that are not, and what differs."""
    reader, compared, left_out, found = FOUR if version.startswith("4") else FIVE, 0, 0, []
    contents = {}
    for kind, name, usual, asked in facts(version):
        if kind not in kinds:
            continue
        if kind not in contents:
            contents[kind] = dict(plants(kind))
        content = contents[kind][name]
        root = Config({**content, "architectures": ["X"]}, "config.json")
        part = root.inside("text_config") if "text_config" in content else root
        takes = next(t for t in taken(root, part, row_of(part["model_type"])) if t.reader == reader)
        if takes.why or asked is None:
            left_out += 1
            continue
        compared += len(takes.values)
        found += [(kind, name, *each) for each in wrong(version, content, takes, usual, asked)]
    return compared, left_out, found


COMPARED = {"4.57.6": (13_545, 534), "5.23.0": (14_453, 607)}  # values; files that are refused or not read


@pytest.mark.check
@pytest.mark.parametrize("version", FACTS)
def test_no_value_differs_from_what_transformers_takes(version: str) -> None:
    compared, left_out, found = differences(version, {kind for kind, *_ in FACTS[version]})
    assert not found
    assert (compared, left_out) == COMPARED[version]


@pytest.mark.parametrize("version", FACTS)
def test_no_value_of_a_few_types_differs(version: str) -> None:
    compared, _, found = differences(version, {"llama", "gemma3_text"})
    assert compared > 200 and not found


@pytest.mark.check
def test_the_installed_version_takes_what_was_written_down() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if transformers.__version__ not in FACTS:
        pytest.skip(f"nothing was written down of {transformers.__version__}")
    from tests.model.rows.readers_at_work import lines

    assert [list(line) for line in lines()] == FACTS[transformers.__version__]


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
NEWER = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, []),
        (NEWER, [BASE]),
        ({"rope_theta": 500_000.0}, []),
        ({**NEWER, "rope_theta": 500_000.0}, []),
        ({**NEWER, "rope_theta": 10_000.0}, [BASE]),
        ({"rope_parameters": YARN}, [BASE, SCALED]),
        ({"rope_parameters": YARN, "rope_theta": 500_000.0, "rope_scaling": YARN}, []),
        # llama.cpp looks for rope_parameters first, transformers 5 for rope_scaling
        ({"rope_parameters": YARN, "rope_theta": 500_000.0, "rope_scaling": {**YARN, "factor": 2.0}}, [SCALED]),
        ({"head_dim": 32}, []),
        ({"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True}, []),
    ],
)
def test_what_readers_of_a_llama_disagree_on(change: dict[str, Any], what: list[str]) -> None:
    root = Config({**LLAMA, "transformers_version": "5.0", **change}, "config.json")
    readings = taken(root, root, row_of("llama"))
    assert [reading.reader for reading in readings] == [*READERS]
    assert not any(reading.why for reading in readings)
    found = disagreements(readings, root)
    assert [each.place.what for each in found] == what
    if what == [BASE]:
        assert found[0].values == "rotary base 10000 (transformers 4.57), 500000 (transformers 5, vLLM, llama.cpp)"
        assert found[0].advice == "transformers 4.57 looks for rope_theta: write 500000 there."


def test_a_reader_that_does_not_know_the_type_disagrees_with_nobody() -> None:
    content = {
        **LLAMA,
        "model_type": "qwen3_5_text",
        "architectures": ["Unknown"],
        **NEWER,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    root = Config(content, "config.json")
    readings = taken(root, root, row_of("qwen3_5_text"))
    assert [reading.reader for reading in readings if reading.why == UNKNOWN] == [FOUR, VLLM, LLAMA_CPP]
    assert not disagreements(readings, root)


RAN = {"4.57.6": 86, "5.23.0": 137}
GEMMA = {**LLAMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 12}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_hidden_layers": 4}
MISTRAL["num_key_value_heads"] = 2
EVERY_THIRD = [FULL if i % 3 == 2 else SLIDING for i in range(12)]
NO_WINDOW_FIRST = {"sliding_window": 4, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]}


@pytest.mark.parametrize(
    ("config", "readers"),
    [
        (GEMMA, {FOUR: "0-4, 6-10", FIVE: "0-4, 6-10", VLLM: "0-4, 6-10", LLAMA_CPP: "0-4, 6-10"}),
        # the graph of llama.cpp has the period of published files
        ({**GEMMA, "layer_types": EVERY_THIRD}, {FIVE: "0-1, 3-4, 6-7, 9-10", LLAMA_CPP: "0-4, 6-10"}),
        ({**GEMMA, "sliding_window_pattern": 3}, {FIVE: "0-1, 3-4, 6-7, 9-10", LLAMA_CPP: "0-4, 6-10"}),
        ({**MISTRAL, "sliding_window": 4}, {FOUR: "all", FIVE: "all", VLLM: "all"}),
        ({**MISTRAL, "sliding_window": None}, {FOUR: "none", FIVE: "none", VLLM: "none"}),
        # its code in transformers does not look at types of layers
        ({**MISTRAL, **NO_WINDOW_FIRST}, {FOUR: "all", FIVE: "all"}),
    ],
)
def test_layers_with_a_window(config: dict[str, Any], readers: dict[str, str]) -> None:
    root = Config(config, "config.json")
    readings = taken(root, root, row_of(config["model_type"]))
    seen = {each.reader: value for each in readings for place, value in each.values.items() if place.what is WINDOWED}
    assert readers.items() <= seen.items()
    disagree = any(each.place.what is WINDOWED for each in disagreements(readings, root))
    assert disagree == (len({*readers.values()}) > 1)


AT_WORK = json.loads(WINDOWS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("version", AT_WORK)
def test_layers_with_a_window_are_those_of_models_at_work(version: str) -> None:
    """Tiny models of 4.57 and 5: a layer has a window if its queries see no key farther back."""
    reader, compared = FOUR if version.startswith("4") else FIVE, 0
    for kind, plant, layers in AT_WORK[version]:
        content = {
            "model_type": kind,
            "transformers_version": version,
            "architectures": ["X"],
            **SIZES,
            **PLANTS[plant],
        }
        root = Config(content, "config.json")
        takes = next(each for each in taken(root, root, row_of(kind)) if each.reader == reader)
        for place, value in takes.values.items():
            if place.what is WINDOWED:
                assert value == layers, (kind, plant)
                compared += 1
    assert compared == RAN[version]


def test_an_activation_that_vllm_takes_by_its_key() -> None:
    sizes = {**LLAMA, "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "num_key_value_heads": 2}
    for value in ("relu2", "gelu"):
        root = Config({**sizes, "hidden_act": value}, "config.json")
        taken_by = {each.reader: each.values for each in taken(root, root, row_of("nemotron"))}
        assert [value for place, value in taken_by[VLLM].items() if place.what is ACTIVATION] == [value]


def test_another_activation_is_refused_where_code_has_one() -> None:
    root = Config({**LLAMA, "hidden_act": "gelu"}, "config.json")
    assert taken(root, root, row_of("llama"))[2].why == "refuses the activation gelu: its code has silu alone"


def test_remote_code_is_not_said_to_be_unread_by_vllm() -> None:
    root = Config({**LLAMA, "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]}, "config.json")
    four, five, vllm, llama_cpp = taken(root, root, row_of("minicpm"))
    assert (four.why, five.why) == (UNKNOWN, UNKNOWN) and "code of its own" in vllm.why
    assert llama_cpp.values and not vllm.values


@pytest.mark.parametrize(
    "fixture",
    sorted(path.parent for path in (Path(__file__).parent / "fixtures").glob("*/config.json")),
    ids=lambda path: path.name,
)
def test_readers_agree_on_healthy_files(fixture: Path) -> None:
    """A file of transformers 5 has its numbers where 4.57 does not look; nothing else is said of these."""
    root = Config(json.loads((fixture / "config.json").read_text()), "config.json")
    part = root.inside("text_config") if "text_config" in root else root
    kind = part.get("model_type")
    if any(kind in row.types for row in FAMILIES):
        for each in disagreements(taken(root, part, row_of(kind)), root):
            if each.place.what is WINDOWED and kind == "gemma3_text":  # a period of its own, as no published file has
                continue
            assert each.place.what in (BASE, SCALED, SHARE, DETAILS) and "rope_parameters" in part
            assert each.taken[FIVE] != each.taken[FOUR]
            others = {shown(value) for reader, value in each.taken.items() if reader != FOUR}
            assert len(others) == 1


# The keys that matter here, as these models were published.
PUBLISHED = json.loads((Path(__file__).parent / "readers_published.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_readers_agree_on_published_files(name: str) -> None:
    root = Config(PUBLISHED[name], "config.json")
    part = root.inside("text_config") if "text_config" in root else root
    readings = taken(root, part, row_of(part["model_type"]))
    assert not any(reading.why.startswith("not compared") for reading in readings)
    assert not disagreements(readings, root)


@pytest.mark.parametrize("value", ["\x1b[31m", [1], {"a": 1}, -1, 10**400, True, None])
def test_strange_values_are_shown_or_refused(value: Any) -> None:
    for key in (
        "rope_theta",
        "head_dim",
        "rms_norm_eps",
        "hidden_act",
        "rope_scaling",
        "architectures",
        "sliding_window",
    ):
        root = Config({**LLAMA, key: value}, "config.json")
        readings = taken(root, root, row_of("llama"))
        for each in disagreements(readings, root):
            assert len(each.values) < 2000
    scaled = Config({**LLAMA, "rope_scaling": {"rope_type": value, "factor": value}}, "config.json")
    taken(scaled, scaled, row_of("llama"))
