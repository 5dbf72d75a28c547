"""Checkpoints, fingerprints and registries made by somebody who knows how lineage works."""

import json
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.plants.attacks import forged, framed, hidden, random_base
from tests.support.plants.derivations import averaged, drifted
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.two_layers import TWO_LAYERS
from weightscope.pairs.changes.token_order import match_rows, would_show
from weightscope.pairs.lineage.probes import Probes, drawn_probes, keyed_probes, signs
from weightscope.pairs.lineage.sketches import fingerprint, load


@pytest.fixture(scope="module")
def stranger(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacks") / "stranger"
    write_weights(random_base(read_weights(base)), folder)
    return folder


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_bytes(bytes(range(32)))
    return path


def test_framing_fits_public_probes_alone(base, stranger, tmp_path):
    """One least-squares solution a head gives public sketches any cosine; probes drawn afterwards see nothing."""
    write_weights(framed(read_weights(base), fingerprint(stranger), 0.5), tmp_path / "framed")
    fingerprint(stranger).save(tmp_path / "stranger.wsf")
    by_print = ws.lineage(tmp_path / "framed", tmp_path / "stranger.wsf")
    assert by_print.verdict == "related" and by_print.origin.match.mean == pytest.approx(0.5, abs=0.02)
    assert "can be made to fit public probes" in by_print.lead
    assert "stranger is what the fingerprint calls itself" in by_print.lead
    by_weights = ws.lineage(tmp_path / "framed", stranger)
    assert (by_weights.verdict, by_weights.origin) == ("unrelated", None)


def test_framing_does_not_fit_a_key(base, stranger, key, tmp_path):
    write_weights(framed(read_weights(base), fingerprint(stranger), 0.5), tmp_path / "framed")
    fingerprint(stranger, keyed_probes(key)).save(tmp_path / "stranger.wsf")
    assert ws.lineage(tmp_path / "framed", tmp_path / "stranger.wsf", probe_key=key).origin is None
    fingerprint(base, keyed_probes(key)).save(tmp_path / "base.wsf")
    result = ws.lineage(tmp_path / "framed", tmp_path / "base.wsf", probe_key=key)
    assert result.verdict == "related" and "drawn with a key" in result.lead


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_another_basis_with_renumbered_tokens_is_found(base, tmp_path, cut):
    made, _ = hidden(read_weights(base), cut=cut)
    write_weights(made, tmp_path / "hidden")
    result = ws.lineage(tmp_path / "hidden", base)
    assert (result.verdict, result.origin.match.route) == ("related", "tokens")
    assert result.alignment["base_layer"].tolist() == [0, 1, 2, 3, 4]
    assert {"vocabulary reordered", "stream rotated"} <= {kind.kind for kind in result.kinds}


def test_embeddings_that_cannot_be_told_apart_leave_a_doubt(base, stranger, tmp_path):
    """Where a renumbered copy would not be found, the verdict is not "unrelated"."""
    weights = read_weights(stranger)
    rows = weights.parts[None, "tokens"]
    write_weights(weights.but({(None, "tokens"): np.tile(rows[:8], (len(rows) // 8, 1))}), tmp_path / "tiled")
    assert not would_show(ws.open_model(tmp_path / "tiled")) and would_show(ws.open_model(stranger))
    result = ws.lineage(tmp_path / "tiled", base)
    assert result.verdict == "undecided" and "too much alike" in result.lead


def test_rows_are_matched_in_any_order_and_basis():
    rng = np.random.default_rng(0)
    rows, order = rng.standard_normal((500, 64)) * np.geomspace(1, 0.3, 64), rng.permutation(500)
    turn = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    left, right, share = match_rows((3 * rows[order] @ turn).astype(np.float32), rows.astype(np.float32))
    assert share == 1 and np.array_equal(order[left], right)
    assert match_rows(rng.standard_normal((500, 64)), rows)[2] < 0.6


def test_seed_follows_from_digests_and_nonce(base, stranger):
    """Anybody can draw a result's probes again; other weights or another nonce give others."""
    models, nonce = [ws.open_model(base), ws.open_model(stranger)], "drawn last"
    result = ws.lineage(*models, nonce=nonce)
    record = result.as_json()
    text = "\n".join([*record["probe_digests"], record["nonce"]])
    assert record["probe_seed"] == sha256(text.encode()).hexdigest()
    assert drawn_probes(models[::-1], nonce) == result.probes
    seeds = {drawn_probes(pair, letter).seed for pair in (models, models[:1]) for letter in "ab"}
    assert len(seeds) == 4
    again = ws.lineage(*models, nonce=nonce)
    assert again.as_json()["background"] == record["background"]


def test_digest_covers_every_weight_that_is_sketched(base, tmp_path):
    weights = read_weights(base)
    seeds = set()
    for part in ((2, "q.w"), (4, "o.w"), (None, "tokens")):
        moved = weights.parts[part].copy()
        moved[-1, -1] += 1
        write_weights(weights.but({part: moved}), tmp_path / part[1])
        seeds.add(drawn_probes([ws.open_model(tmp_path / part[1])], "n").seed)
    assert len({*seeds, drawn_probes([ws.open_model(base)], "n").seed}) == 4


def test_other_probes_draw_other_signs():
    public, drawn = signs(128, 64, "left"), signs(128, 64, "left", Probes("ab"))
    assert abs((public * drawn).mean()) < 4 / np.sqrt(public.size)


REFUSED = {
    "a key for a public print": (False, True, "made without a probe key, which cannot be read with this key"),
    "no key for a keyed print": (True, False, "made with a probe key, which cannot be read with the public probes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_prints_are_read_with_their_key_alone(base, key, tmp_path, case):
    keyed, given, expected = REFUSED[case]
    fingerprint(base, keyed_probes(key) if keyed else Probes()).save(tmp_path / "base.wsf")
    with pytest.raises(ws.CheckpointError, match=f"^base.wsf: is a fingerprint {expected}"):
        ws.lineage(base, tmp_path / "base.wsf", probe_key=key if given else None)


def test_short_key_is_refused(base, tmp_path):
    (tmp_path / "key").write_text("secret")
    arguments = ["fingerprint", str(base), "--out", str(tmp_path / "a.wsf"), "--probe-key", str(tmp_path / "key")]
    result = run(*arguments)
    assert result.exit_code == 2 and "has 6 bytes; a key has at least 16" in result.output


def test_key_of_a_registry(base, key, tmp_path):
    (tmp_path / "list.txt").write_text(f"{base}\n")
    common = ["--probe-key", str(key)]
    made = run("fingerprint", tmp_path / "list.txt", "--out", tmp_path / "r", *common)
    assert made.exit_code == 0, made.output
    asked = ["lineage", str(base), str(tmp_path / "r"), "--out", str(tmp_path / "o"), "--json"]
    result = run(*asked, *common)
    assert json.loads(result.stdout)["verdict"] == "related"


def test_forged_layers_take_no_place_in_a_registry(base, stranger, tmp_path):
    """A registry is searched by sums over heads; a print with the true base's sums but other heads is refused."""
    of_base, of_stranger = fingerprint(base), fingerprint(stranger)
    (tmp_path / "prints").mkdir()
    of_base.save(tmp_path / "prints" / "true.wsf")
    for k in range(9):
        forged(tmp_path / "prints" / f"a{k}.wsf", f"model {k}", of_stranger, of_base)
    with pytest.raises(ws.CheckpointError, match="layers_direct do not follow from its heads"):
        load(tmp_path / "prints" / "a0.wsf")
    write_weights(drifted(read_weights(base), 0.1), tmp_path / "suspect")
    result = ws.lineage(tmp_path / "suspect", tmp_path / "prints")
    assert (result.verdict, result.base, len(result.unread)) == ("related", "base", 9)


def test_equal_fingerprints_are_ties(base, tmp_path):
    (tmp_path / "prints").mkdir()
    for k in range(10):
        forged(tmp_path / "prints" / f"a{k}.wsf", f"model {k}", fingerprint(base))
    result = ws.lineage(base, tmp_path / "prints")
    assert len(result.ties) == 9 and "fit as well" in result.lead and result.as_json()["ties"] == result.ties


def test_each_base_is_judged_by_itself(base, stranger):
    result = ws.lineage(stranger, [base, TWO_LAYERS])
    judged = {each["name"]: each["heads"] for each in result.as_json()["bases"]}
    assert judged == {"base": "unrelated", result.compared[1].base.name: "undecided"}
    assert result.verdict == "undecided" and "Nothing is shared with base." in result.lead


def test_a_merge_names_all_its_parents_first(base, stranger, tmp_path):
    both = [read_weights(base), read_weights(stranger)]
    write_weights(averaged(both, [0.5, 0.5]), tmp_path / "merged")
    result = ws.lineage(tmp_path / "merged", [base, stranger])
    parents, _, _ = result.lead.partition(", as a merge does")
    assert "base (0.50)" in parents and "stranger (0.50)" in parents


def test_drawn_probes_match_as_public_ones_do(base):
    """Other signs, same estimate: likeness differs by the error of a sketch alone."""
    sketches = [fingerprint(base, probes) for probes in (Probes(), Probes("ab"))]
    inner = [np.einsum("nmk,hmk->nh", each.direct, each.direct) / 2 for each in sketches]
    apart = (inner[0] - inner[1])[np.triu_indices(len(inner[0]), 1)]
    assert abs(apart.mean()) < 0.03 and apart.std() < 3 / np.sqrt(2 * 128)
    assert replace(sketches[0], probes=Probes()).layers == sketches[1].layers
