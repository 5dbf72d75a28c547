"""What `same` says of a copy by the identity of its original: nothing damaged is accepted, nothing whole refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import bfloat16, write, write_shards
from tests.support.plants.deeds import ALL_CONTAINERS, base, cases
from tests.support.plants.destroyed import DESTROYED, OTHER_LAYER, destroyed, names_of
from tests.support.plants.families import FAMILIES, random_llama
from weightscope.core.errors import CheckpointError
from weightscope.pairs.identity.identity import Identity, identity
from weightscope.pairs.same.judge import Judged
from weightscope.pairs.same.same import Same

ACCEPTED = ("same bytes", "same values", "rounded")
LAYER = "model.layers.1."
OUTSIDE = {"tokens", "unembedding", "norm.outputs"}
Q, GAIN, HEAD, TOKENS = (
    f"{LAYER}self_attn.q_proj.weight", f"{LAYER}input_layernorm.weight", "lm_head.weight", "model.embed_tokens.weight",
)  # fmt: skip
CONFIG = random_llama().config


def llama() -> dict[str, Any]:
    return dict(random_llama().tensors)


def put(folder: Path, tensors: Mapping[str, Any], **keys: Any) -> Path:
    folder.mkdir(parents=True)
    write(folder / "model.safetensors", dict(tensors))
    (folder / "config.json").write_text(json.dumps(CONFIG | keys))
    return folder


def kept(source: Path) -> tuple[Path, Identity]:
    """The file of an identity, next to its checkpoint."""
    made = identity(source)
    path = source.parent / f"{source.name}.id.json"
    path.write_text(json.dumps(made.as_json()))
    return path, made


def judged(folder: Path, a: Mapping[str, Any], b: Mapping[str, Any], **of_b: Any) -> Same:
    """B by the identity of A; the other way round, and by two identities, the verdict is as strong."""
    original, copy = put(folder / "a", a), put(folder / "b", b, **of_b)
    file, of_other = kept(original)[0], kept(copy)[0]
    result = ws.same(file, copy)
    for pair in ((copy, file), (file, of_other)):
        assert (ws.same(*pair).verdict in ACCEPTED) == (result.verdict in ACCEPTED), pair
    return result


def rounded(w: np.ndarray) -> np.ndarray:
    """To bfloat16, nearest even."""
    bits = w.view("<u4").astype("u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype("<u4").view("<f4")


# The same values, called nothing else


def with_nan(payload: int) -> dict[str, Any]:
    w = llama()[Q]
    w.view("<u4")[0, 0] = payload
    return llama() | {Q: w}


zeros, scalar, empty = (llama()[Q] > 0.1), np.full((), 3, np.float32), np.zeros((0, 4), np.float32)
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "negative zeros": (
        llama() | {Q: np.where(zeros, np.float32(0), llama()[Q])},
        llama() | {Q: np.where(zeros, np.float32(-0.0), llama()[Q])},
    ),
    "another NaN": (with_nan(0x7FC00000), with_nan(0xFFC12345)),
    "float64": (llama(), {name: w.astype("f8") for name, w in llama().items()}),
    "another order": (llama(), dict(reversed(llama().items()))),
    "no prefix": (llama(), {name.removeprefix("model."): w for name, w in llama().items()}),
    "a scalar and an empty tensor": (llama() | {"s": scalar, "e": empty}, {"e": empty, "s": scalar} | llama()),
    "a bias of zeros": (llama(), llama() | {f"{LAYER}self_attn.q_proj.bias": np.zeros(64, np.float32)}),
    "two projectors in another order": (
        llama() | {"x.mm_projector.0.weight": llama()[Q], "y.mm_projector.0.weight": -llama()[Q]},
        {"y.mm_projector.0.weight": -llama()[Q], "x.mm_projector.0.weight": llama()[Q]} | llama(),
    ),
}


@pytest.mark.parametrize("how", WHOLE)
def test_same_values_have_one_identity(how: str, tmp_path: Path) -> None:
    a, b = WHOLE[how]
    assert judged(tmp_path, a, b).verdict == "same values"
    assert identity(tmp_path / "a").wsid == identity(tmp_path / "b").wsid


def test_shards_have_the_identity_of_the_whole(tmp_path: Path) -> None:
    names = list(llama())
    (tmp_path / "b").mkdir()
    shards = [{name: llama()[name] for name in part} for part in (names[::2], names[1::2])]
    write_shards(tmp_path / "b", *shards)
    (tmp_path / "b" / "config.json").write_text(json.dumps(CONFIG))
    assert identity(put(tmp_path / "a", llama())).wsid == identity(tmp_path / "b").wsid


# Roundings


def test_rounded_copies_are_rounded(tmp_path: Path) -> None:
    for name, copy in {
        "bf16": {key: bfloat16(rounded(w)) for key, w in llama().items()},
        "f16": {key: w.astype("f2") for key, w in llama().items()},
        "one tensor": llama() | {Q: llama()[Q].astype("f2")},
        "stored as float32": {key: rounded(w) for key, w in llama().items()},
    }.items():
        assert judged(tmp_path / name, llama(), copy).verdict == "rounded", name


FROM_FLOAT64 = {"F32": lambda w: w.astype("f4"), "BF16": lambda w: bfloat16(rounded(w.astype("f4"))),
                "F16": lambda w: w.astype("f4").astype("f2"), "F16 at once": lambda w: w.astype("f2")}  # fmt: skip


@pytest.mark.parametrize("dtype", FROM_FLOAT64)
def test_float64_may_be_rounded(dtype: str, tmp_path: Path) -> None:
    """Digests are of values rounded by float32, and none is of float32 where float64 is needed."""
    rng = np.random.default_rng(0)
    original = {key: w * (1 + 1e-9 * rng.standard_normal(w.shape)) for key, w in llama().items()}
    copy = {key: FROM_FLOAT64[dtype](w) for key, w in original.items()}
    by_identity = judged(tmp_path, original, copy)
    assert by_identity.verdict == ("undecided" if dtype in ("F32", "F16 at once") else "rounded")
    a, b = tmp_path / "a", tmp_path / "b"
    assert ws.same(a, b).verdict == ws.same(b, a).verdict == "rounded"
    moved = {**copy, Q: original[Q] + 1e-3}
    assert ws.same(a, put(tmp_path / "c", moved)).verdict == "different"


TINY, CONSTANT = llama()[Q] * np.float32(1e-9), np.full((64, 64), 1.0001, np.float32)
NEAR_ONE = (1 + 1e-4 * np.random.default_rng(0).standard_normal(64)).astype(np.float32)
NOT_SHOWN = {
    "tiny values to zeros": (Q, TINY, np.zeros_like(TINY)),
    "a constant to ones": (Q, CONSTANT, np.ones_like(CONSTANT)),
    "gains near one to ones": (GAIN, NEAR_ONE, np.ones_like(NEAR_ONE)),
}


@pytest.mark.parametrize("how", NOT_SHOWN)
def test_constants_in_float32_do_not_show_a_rounding(how: str, tmp_path: Path) -> None:
    name, before, after = NOT_SHOWN[how]
    original, copy = put(tmp_path / "a", llama() | {name: before}), put(tmp_path / "b", llama() | {name: after})
    result = ws.same(kept(original)[0], copy)
    assert result.verdict == "different"
    assert [each.name_b for each in result.differing] == [name]


def test_zeros_do_not_show_a_rounding_between_identities(tmp_path: Path) -> None:
    original, copy = put(tmp_path / "a", llama() | {Q: TINY}), put(tmp_path / "b", llama() | {Q: np.zeros_like(TINY)})
    assert ws.same(kept(original)[0], kept(copy)[0]).verdict == "different"


def test_values_that_are_not_finite_are_no_silent_nan(tmp_path: Path) -> None:
    result = judged(tmp_path, llama(), with_nan(0x7FC00000))
    assert result.verdict == "different"
    assert "not finite" in result.lead
    assert "nan" not in result.lead


# Tensors that are missing, or stand in for others


def without(name: str, **added: Any) -> dict[str, Any]:
    return {key: w for key, w in llama().items() if key != name} | added


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (Q, "layer 1 q"), (GAIN, "layer 1 norm.before"), (HEAD, "unembedding"), ("model.norm.weight", "norm.outputs"),
    ],
)  # fmt: skip
def test_name_that_reads_as_a_label_is_no_role(name: str, label: str, tmp_path: Path) -> None:
    """A tensor of the file under the label of one that is gone; `same` with both files is not misled either."""
    copy = without(name, **{label: llama()[name]})
    if " " in label:
        original, decoy = put(tmp_path / "a", llama()), put(tmp_path / "b", copy)
        with pytest.raises(CheckpointError, match="a space or a control character"):
            identity(decoy)
        assert ws.same(original, decoy).verdict == "different"
        return
    assert judged(tmp_path, llama(), copy).verdict == "different"
    assert ws.same(tmp_path / "a", tmp_path / "b").verdict == "different"
    assert identity(tmp_path / "a").wsid != identity(tmp_path / "b").wsid


def test_line_feed_in_a_name_makes_no_line(tmp_path: Path) -> None:
    """One tensor whose name has the line of another in it."""
    x, y = np.ones((2, 2), np.float32), np.full((2, 2), 2, np.float32)
    two = identity(put(tmp_path / "a", {"u": x, "v": y}, model_type="unknown"))
    name = f"u {two.tensors['u'].line}\nv"
    with pytest.raises(CheckpointError, match="a space or a control character"):
        identity(put(tmp_path / "b", {name: y}, model_type="unknown"))


def test_extra_tensor_is_different(tmp_path: Path) -> None:
    for name in ("x.weight", "x.mixer.A_log"):
        result = judged(tmp_path / name, llama(), llama() | {name: llama()[Q]})
        assert result.verdict == "different", name


def test_lost_head_is_different_unless_the_config_ties_it(tmp_path: Path) -> None:
    """A head with the values of the tokens: an untied model without it has a random one."""
    tied = llama() | {HEAD: llama()[TOKENS]}
    lost = {name: w for name, w in tied.items() if name != HEAD}
    assert judged(tmp_path / "untied", tied, lost).verdict == "different"
    assert judged(tmp_path / "tied", tied, lost, tie_word_embeddings=True).verdict == "same values"


def test_head_that_the_config_overwrites_is_undecided(tmp_path: Path) -> None:
    assert judged(tmp_path, llama(), llama(), tie_word_embeddings=True).verdict == "undecided"


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rms_norm_eps": 1e-2},
        {"hidden_act": "relu"}, {"num_attention_heads": 8, "head_dim": 8}, {"attention_bias": True}, {"unheard_of": 7},
    ],
)  # fmt: skip
def test_other_config_is_not_accepted(keys: dict[str, Any], tmp_path: Path) -> None:
    assert judged(tmp_path, llama(), llama(), **keys).verdict in ("different", "undecided")


def test_nothing_in_common_says_so(tmp_path: Path) -> None:
    for name in "xy":
        put(tmp_path / name, {f"{name}.bias": np.zeros(3, np.float32)}, model_type="unknown")
    result = ws.same(kept(tmp_path / "x")[0], tmp_path / "y")
    assert result.verdict == "undecided"
    assert "no tensor" in result.lead


@pytest.mark.check
@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_lost_decay_is_different(kind: str, tmp_path: Path) -> None:
    """A_log is left out of the identity, and a copy without it is not the model."""
    pytest.importorskip("transformers", reason="tiny models are made by transformers; install the extra `runner`")
    from safetensors.numpy import load_file

    from tests.model.rows.mixers_models import tiny_mixers

    tiny_mixers(kind).save_pretrained(tmp_path / "a")
    file, _ = kept(tmp_path / "a")
    assert ws.same(file, tmp_path / "a").verdict == "same values"
    stored = load_file(tmp_path / "a" / "model.safetensors")
    name = next(name for name in stored if name.endswith("A_log"))
    changes = {"lost": None, "moved": stored[name] + 1}
    for how, w in changes.items():
        (tmp_path / how).mkdir()
        rest = {key: v for key, v in stored.items() if key != name} | ({} if w is None else {name: w})
        write(tmp_path / how / "model.safetensors", rest)
        (tmp_path / how / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
        assert ws.same(file, tmp_path / how).verdict == "different", how


# Planted deeds

SOME = (
    "one norm plus 1",
    "square matrix transposed",
    "truncated write",
    "rope base",
    "layers exchanged",
    "negated",
)


@pytest.mark.parametrize("deed", SOME)
def test_deed_in_a_llama_is_different(deed: str, tmp_path: Path) -> None:
    case = next(cases("llama", lambda *_: False, [deed], random_llama()))
    original, copy = put(tmp_path / "a", llama()), put(tmp_path / "b", case.planted.tensors, **case.planted.config)
    result = ws.same(kept(original)[0], copy)
    assert result.verdict == "different"
    assert {each.name_b for each in result.differing} == {*case.words}


def layer_of(each: Judged) -> int | None:
    """Its layer; an identity has the layer of a tensor that the copy lacks in its label."""
    label = re.match(r"layer (\d+) ", each.role)
    return int(label[1]) if label else each.layer


@pytest.mark.census
@pytest.mark.parametrize("container", ["F32", "BF16, two shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_both_files_deny_an_identity_accepts_never(family: str, container: str, tmp_path: Path) -> None:
    """Every deed, in a float container."""
    pytest.importorskip("transformers", reason="tiny models are made by transformers; install the extra `runner`")
    ALL_CONTAINERS["F32"].write(base(family), tmp_path / "a")
    file, _ = kept(tmp_path / "a")
    for i, case in enumerate(cases(family, ALL_CONTAINERS[container].packs)):
        ALL_CONTAINERS[container].write(case.planted, copy := tmp_path / f"b{i}")
        by_values, by_identity = ws.same(tmp_path / "a", copy), ws.same(file, copy)
        if by_values.verdict in ("different", "undecided"):
            assert by_identity.verdict not in ACCEPTED, case.deed
            layers = [{*map(layer_of, result.differing)} for result in (by_values, by_identity)]
            assert layers[0] <= layers[1], case.deed


@pytest.mark.check
@pytest.mark.parametrize("container", ["FP8 in blocks", "GPTQ, 4 bits", "MLX, 4 bits", "GGUF, Q8_0", "GGUF, Q4_0"])
def test_destroyed_tensors_of_a_quantised_copy_are_different(container: str, tmp_path: Path) -> None:
    """All tensors at once; the copy that nothing was done to is undecided."""
    pytest.importorskip("torch", reason="containers are written by PyTorch")
    pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")
    file, _ = kept(put(tmp_path / "a", llama()))
    planted = random_llama()
    for deed in ("nothing", *DESTROYED, OTHER_LAYER):
        names = names_of(planted, deed)
        bad = planted if deed == "nothing" else destroyed(planted, deed, names)
        with np.errstate(all="ignore"):
            ALL_CONTAINERS[container].write(bad, tmp_path / deed)
        copy = tmp_path / deed / ("model.gguf" if container.startswith("GGUF") else "")
        result = ws.same(file, copy)
        assert result.verdict == ("undecided" if deed == "nothing" else "different"), deed
        accepted = {each.label for each in result.tensors if each.verdict != "different"}
        assert deed == "nothing" or accepted <= (OUTSIDE if deed == OTHER_LAYER else set()), deed
