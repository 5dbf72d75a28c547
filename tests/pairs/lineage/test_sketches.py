"""A fingerprint: what its sketches estimate, that they stay the same, and what a damaged file does."""

import json
from hashlib import sha256

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.two_layers import TWO_LAYERS
from weightscope.pairs.lineage.probes import signs
from weightscope.pairs.lineage.sketches import POINTS, SIZES, SKETCH, fingerprint, load, token_ids


@pytest.fixture(scope="module")
def model():
    return ws.open_model(TWO_LAYERS)


@pytest.fixture(scope="module")
def sketches(model):
    return fingerprint(model)


def dense(model, name):
    """Every head's matrix in float64, without its trace: (N, d d)."""
    maps = [getattr(head, name).dense().astype(np.float64) for layer in model.layers for head in layer.heads]
    return np.stack([(w - np.eye(len(w)) * w.trace() / len(w)).ravel() for w in maps])


@pytest.mark.parametrize(("place", "name"), [(0, "qk"), (1, "vo")])
def test_cosines_of_sketches_estimate_those_of_maps(model, sketches, place, name):
    flat = dense(model, name)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    estimated = sketches.direct[:, place] @ sketches.direct[:, place].T
    errors = (estimated - flat @ flat.T)[np.triu_indices(len(flat), 1)]
    assert abs(errors.mean()) < 4 / np.sqrt(SKETCH * len(errors))
    assert errors.std() < 1.5 / np.sqrt(SKETCH)


def test_spectra_and_norms_equal_those_of_dense_maps(model, sketches):
    head = model.layers[1].heads[3]
    values = np.linalg.svd(head.vo.dense().astype(np.float64), compute_uv=False)
    place = int(np.flatnonzero((sketches.layer == 1) & (sketches.head == 3))[0])
    norm = np.sqrt((values**2).sum())
    assert sketches.norms[place, 1] == pytest.approx(norm, rel=1e-5)
    assert sketches.spectra[place, 1, 0] == pytest.approx(np.log(values[0] / norm), abs=1e-5)


def test_a_file_holds_the_same_numbers(sketches, tmp_path):
    sketches.save(tmp_path / "embedded.wsf")
    back = load(tmp_path / "embedded.wsf")
    assert (back.about, back.layers) == (sketches.about, sketches.layers)
    for name in ("direct", "tokens"):
        assert np.vecdot(getattr(back, name), getattr(sketches, name)).min() > 0.999
    np.testing.assert_allclose(back.spectra, sketches.spectra, atol=5e-3)


def test_a_7b_model_has_less_than_a_megabyte():
    of_a_head = 2 * (2 * SKETCH + 2 * POINTS + 4) + 3 * 4  # two sketches in bytes, a spectrum in halves, norms, indices
    assert 32 * 32 * of_a_head + 4096 < 1e6


def test_signs_never_change():
    """A registry is read for years: other signs would make every fingerprint in it useless."""
    drawn = signs(SKETCH, 768, "left")
    assert set(np.unique(drawn)) == {-1.0, 1.0}
    assert abs(drawn.mean()) < 4 / np.sqrt(drawn.size)
    assert sha256((drawn > 0).tobytes()).hexdigest()[:16] == "46fa1ecc8910b10c"


def test_a_longer_vocabulary_is_seen_through_the_same_tokens():
    assert np.array_equal(token_ids(50257), token_ids(50400))
    assert set(token_ids(9000)) <= set(token_ids(16384))
    assert token_ids(300).tolist() == list(range(300))


BROKEN = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "text": lambda path: path.write_text("no fingerprint"),
    "another version": lambda path: rewritten(path, version=99),
    "no description": lambda path: rewritten(path, drop=True),
    "no sizes": lambda path: rewritten(path),
    "a missing tensor": lambda path: rewritten(path, without="spectra"),
    "infinite": lambda path: rewritten(path, infinite=True),
    "another shape": lambda path: rewritten(path, shape=True),
}


def rewritten(path, *, version=1, drop=False, without="", infinite=False, shape=False):
    """Write the file again with one thing wrong."""
    arrays = load_file(path)
    if infinite:
        arrays["norms"][0, 0] = np.inf
    if shape:
        arrays["direct"] = arrays["direct"][:, :1]
    arrays.pop(without, None)
    sizes = {} if not (without or infinite or shape) else dict.fromkeys(SIZES, 8)
    about = "{}" if drop else json.dumps({"name": "x", "version": version} | sizes)
    save_file(arrays, path, {"weightscope": about})


@pytest.mark.parametrize("broken", BROKEN)
def test_a_damaged_file_is_one_clear_error(sketches, tmp_path, broken):
    path = tmp_path / "damaged.wsf"
    sketches.save(path)
    BROKEN[broken](path)
    with pytest.raises(ws.CheckpointError, match=r"damaged\.wsf.*fingerprint"):
        load(path)


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(ws.CheckpointError, match=r"absent\.wsf"):
        load(tmp_path / "absent.wsf")
