"""Files of identities from strangers: one line of error or a verdict, soon and in little memory."""

import json
import os
import random
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import write
from weightscope.pairs.identity.identity import identity, read_identity
from weightscope.pairs.identity.wsid import wsid

FOLDER = Path(__file__).parents[2] / "fixtures" / "identity"
SOUND: dict[str, Any] = json.loads((FOLDER / "model.id.json").read_text())
LLAMA, NORM = FOLDER / "llama", "norm.outputs"
CLEAR = "\x1b[2J"


def saved(folder: Path, value: Any) -> Path:
    path = folder / "x.id.json"
    path.write_text(json.dumps(value))
    return path


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The sound file with a value in this place."""
    value = inner = deepcopy(SOUND)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return value


def refused(folder: Path, value: Any) -> str:
    with pytest.raises(ws.CheckpointError) as caught:
        read_identity(saved(folder, value))
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 1000
    return text


def sketch(text: str) -> dict[str, Any]:
    return changed("tensors", NORM, "sketch", to=text)


ONES = " 1" * 16
SETTINGS = ("values", "spelled", "metadata", "kind", "present", "follows", "read", "idle", "makes", "readers")
REFUSED = [
    *(changed(key, to=odd) for key in ("name", "tensors", "settings", "container", "tokenizer", "files", "wsid")
      for odd in (7, [[]], None)),
    *(changed("settings", key, to=7) for key in SETTINGS),
    *(changed("settings", key, to=[[]]) for key in SETTINGS),
    changed("settings", "spelled", to={"a": 1}), changed("settings", "metadata", to="x"),
    changed("settings", "metadata", to=False),
    changed("settings", "makes", to={"a": [1]}), changed("settings", "readers", to={"": [["a"], False, True]}),
    changed("settings", "readers", to={"": ["a", 1, 2, 3, 4]}), changed("settings", "kind", to=["model_type"]),
    sketch("nan" + ONES), sketch("inf" + ONES), sketch("-1" + ONES), sketch("1e308" + ONES), sketch("5 1 2"),
    sketch("5" + f" 1{'0' * 400}" * 16), sketch("5" + f" {'9' * 5000}" * 16), sketch("5" + " 1.5" * 16),
    *(changed("tensors", NORM, "shape", to=odd) for odd in
      ([-1], [1.0], [True], [2**60], [1] * 9, "32", [[32]], None, {"32": 1})),
    *(changed("tensors", NORM, "exact", to=odd) for odd in ("", "f64", "bf16 f8", ["bf16"], None, CLEAR)),
    *(changed("tensors", NORM, "bf16", to=odd) for odd in ("", "0" * 63, "G" * 64, 7, None)),
    changed("tensors", NORM, to=None), changed("wsid", to=f"wsid1:{'0' * 64}"), changed("wsid", to=CLEAR),
    changed("tokenizer", to={"tokens": "x"}), changed("tokenizer", to={"tokens": "x", "size": "many"}),
    changed("tokenizer", to={"tokens": "x", "size": "9" * 500}), changed("tokenizer", to={"size": "7"}),
    changed("name", to="a" * 10**6), changed("files", to={"chat_template.jinja": 7}),
    {"predicate": []}, {"predicate": {}}, {"payload": 7}, {"payload": "!", "payloadType": "x", "signatures": []},
    {"dsseEnvelope": 7}, {"dsseEnvelope": {"payload": "e30=", "payloadType": "application/vnd.in-toto+json",
                                           "signatures": [{"sig": "e30="}]}},
    {"dsseEnvelope": {"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": [7]}},
    [], {}, {"tensors": {}},
]  # fmt: skip


def test_wrong_value_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    for value in REFUSED:
        refused(tmp_path, value)


def test_what_json_does_not_allow_is_refused(tmp_path: Path) -> None:
    text = json.dumps(SOUND)
    path = tmp_path / "x.id.json"
    twice = text.replace('"layer 0 gate": {', '"layer 0 down": {', 1)
    for broken in (text[:-2], twice, "\x00", text.replace(SOUND["name"], "\\ud800\\u0000", 1)[:-1], "[" * 10**5):
        path.write_text(broken)
        with pytest.raises(ws.CheckpointError):
            read_identity(path)


def test_folder_pipe_or_pointer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.id.json").mkdir()
    os.mkfifo(tmp_path / "pipe.id.json")
    (tmp_path / "pointer.id.json").write_text("version https://git-lfs.github.com/spec/v1\nsize 5\n")
    (tmp_path / "device.id.json").symlink_to("/dev/zero")
    for name in ("folder", "pipe", "pointer", "device", "none"):
        with pytest.raises(ws.CheckpointError):
            ws.same(tmp_path / f"{name}.id.json", LLAMA)


# Files that are read


def resealed(value: dict[str, Any], folder: Path) -> Path:
    """The file with the identity that its tensors have."""
    value["wsid"] = f"wsid1:{'0' * 64}"
    return saved(folder, value | {"wsid": refused(folder, value).partition("its tensors give ")[2][:70]})


def test_bias_as_large_as_a_disk_takes_no_memory(tmp_path: Path) -> None:
    """Whether it is zero is known without as many zeros."""
    value = deepcopy(SOUND)
    for i in range(300):
        value["tensors"][f"{i}.bias"] = SOUND["tensors"][NORM] | {"shape": [2**22 - i]}
    value["tensors"]["x.bias"] = SOUND["tensors"][NORM] | {"shape": [2**47] * 8}
    start = time.perf_counter()
    assert ws.same(resealed(value, tmp_path), LLAMA).verdict == "different"
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("key", ["a" * 990, "num_" * 247, "num_" * 247 + "\n", "a." * 495])
@pytest.mark.parametrize("readers", [{}, SOUND["settings"]["readers"]])
def test_thousand_long_keys_of_a_config_are_read_soon(key: str, readers: dict[str, Any], tmp_path: Path) -> None:
    value = deepcopy(SOUND)
    value["settings"]["values"] |= {f"{key}{i}": i for i in range(100)}
    value["settings"]["readers"] = readers
    start = time.perf_counter()
    result = ws.same(saved(tmp_path, value), LLAMA)
    assert result.verdict in ("different", "undecided")
    assert result.lead.isprintable()
    assert time.perf_counter() - start < 10


def test_keys_of_a_gguf_file_are_looked_up_once(tmp_path: Path) -> None:
    value = deepcopy(SOUND)
    value["settings"]["values"] |= {f"key{i}": None for i in range(4_000)}
    value["settings"]["metadata"] = {f"{i}.expert_used_count": 1 for i in range(4_000)}
    start = time.perf_counter()
    ws.same(saved(tmp_path, value), LLAMA)
    assert time.perf_counter() - start < 10


def test_numbers_of_any_size_and_lists_for_numbers_are_compared(tmp_path: Path) -> None:
    value = deepcopy(SOUND)
    value["settings"]["values"] |= dict.fromkeys(("mamba_expand", "hidden_size"), 10**4000)
    value["settings"]["metadata"] = {"a.ssm.inner_size": 1, "a.expert_gating_func": [1], "a.expert_used_count": {}}
    assert ws.same(saved(tmp_path, value), LLAMA).verdict == "different"
    assert ws.same(LLAMA, tmp_path / "x.id.json").verdict == "different"


def test_escapes_in_names_and_labels_reach_no_terminal(tmp_path: Path) -> None:
    value = deepcopy(SOUND)
    value["name"] = f"{CLEAR}\n\u202e"
    value["files"] = {f"{CLEAR}.py": "x"}
    value["settings"]["values"] |= {f"{CLEAR}\n": CLEAR}
    result = ws.same(resealed(value, tmp_path), LLAMA)
    assert result.lead.isprintable()
    for part in result.printed():
        assert CLEAR not in str(part)
    assert CLEAR not in json.dumps(result.as_json())


def test_identity_without_tensors_is_undecided(tmp_path: Path) -> None:
    path = resealed(SOUND | {"tensors": {}}, tmp_path)
    assert ws.same(path, path).verdict == "undecided"
    assert "no tensor" in ws.same(path, path).lead
    assert ws.same(path, LLAMA).verdict == "different"


@pytest.mark.check
def test_mixture_of_as_many_experts_as_there_are_is_read_back(tmp_path: Path) -> None:
    """More tensors than a header may have, in float32."""
    entry = SOUND["tensors"]["layer 0 gate"] | {"exact": "f32", "f32": "0" * 64}
    many = {f"layer {i // 384} expert {i % 384} gate": entry for i in range(60_000)}
    text = json.dumps(SOUND | {"tensors": many, "wsid": ""})
    assert len(text) > 16_000_000
    (tmp_path / "x.id.json").write_text(text)
    with pytest.raises(ws.CheckpointError, match="its tensors give"):
        read_identity(tmp_path / "x.id.json")


def test_name_that_is_no_text_is_hashed_or_refused(tmp_path: Path) -> None:
    """Half a pair of surrogates in a safetensors header."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "model.safetensors", {"\ud800": np.ones(3, np.float32)})
    (folder / "config.json").write_text('{"model_type": "unknown"}')
    try:
        assert identity(folder).wsid.startswith("wsid1:")
    except ws.CheckpointError as error:
        assert str(error).isprintable()


# Any value in any place

ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 10**400, "", "x", f"{CLEAR}\n", [], [1], ["a"], [[]], {}, {"a": 1}, False,
    {"a": {"b": [1]}}, {CLEAR: CLEAR}, "0" * 64, [2**40], [0], "1e308" + ONES, "5" + f" {'9' * 300}" * 16,
]  # fmt: skip
KEYS = ("x.bias", "unembedding", CLEAR, "expert_count", "llama.expert_count", "llama.expert_gating_func", "model_type",
        "llama.leading_dense_block_count", "llama.attention.sliding_window_pattern", "tie_word_embeddings")  # fmt: skip


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from places(inner, (*before, key))


def attacked(rng: random.Random, sound: dict[str, Any]) -> dict[str, Any]:
    value = deepcopy(sound)
    known = [place for place in places(sound) if rng.random() < 0.3 or place[0] not in ("tensors", "sources")]
    for _ in range(rng.choice((1, 1, 2, 3))):
        *outer, last = rng.choice(known)
        inner: Any = value
        try:
            for key in outer:
                inner = inner[key]
            how = rng.random()
            if how < 0.6:
                inner[last] = deepcopy(rng.choice(ODD))
            elif how < 0.8:
                del inner[last]
            else:
                inner |= {rng.choice(KEYS): deepcopy(rng.choice(ODD))}
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    return value


def survives(seeds: range, folder: Path) -> None:
    gguf = json.loads(json.dumps(identity(FOLDER / "model.gguf").as_json()))
    sources = [LLAMA, FOLDER / "model.gguf", FOLDER / "model.id.json"]
    for seed in seeds:
        rng = random.Random(seed)
        path = saved(folder, attacked(rng, rng.choice((SOUND, gguf))))
        pair = rng.sample([path, rng.choice([*sources, path])], 2)
        try:
            result = ws.same(*pair)
        except ws.CheckpointError as error:
            assert str(error).isprintable(), seed
            continue
        assert result.lead.isprintable(), seed
        assert all(CLEAR not in str(part) for part in result.printed()), seed
        json.dumps(result.as_json(), allow_nan=False)


@pytest.mark.filterwarnings("error")
def test_any_value_in_any_place_is_refused_or_judged(tmp_path: Path) -> None:
    survives(range(30), tmp_path)


@pytest.mark.check
@pytest.mark.filterwarnings("error")
def test_many_values_in_any_place_are_refused_or_judged(tmp_path: Path) -> None:
    survives(range(30, 400), tmp_path)


def test_label_cannot_forge_a_line() -> None:
    digests = read_identity(FOLDER / "model.id.json").tensors
    first, second = sorted(digests)[:2]
    forged = {f"{first} {digests[first].values}\n{second}": digests[second]}
    rest = {label: each for label, each in digests.items() if label not in (first, second)}
    assert wsid(rest | forged) != wsid(digests)
