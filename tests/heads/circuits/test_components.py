"""Composition by singular component, against dense matrices and on GPT-2's known heads."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run_undrawn
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import shared
from weightscope.heads.circuits.circuits import _channel, channel_tokens, components, read_by
from weightscope.model.layers.factored import Factored


def test_components_have_the_scores_of_their_rank_one_matrices(two_layers: ws.Model) -> None:
    """|sigma u v' W| / (|sigma u v'| |W|), formed whole; weighted with their energies they give the head's score."""
    vo, qk = two_layers.layer(0).head(2).vo, two_layers.layer(1).head(5).qk
    u, s, vt = np.linalg.svd(vo.dense().astype(np.float64))
    w = qk.dense().astype(np.float64)
    parts = components(vo, qk)
    single = [part for part in parts if part.first == part.last]
    assert len(single) > 20
    for part in single:
        i = part.first - 1
        matrix = s[i] * np.outer(u[:, i], vt[i])
        score = np.linalg.norm(matrix @ w) / (np.linalg.norm(matrix) * np.linalg.norm(w))
        assert part.cs == pytest.approx(score, rel=1e-4)
    cosine = np.linalg.norm(vo.dense() @ w) / (np.linalg.norm(vo.dense()) * np.linalg.norm(w))
    mean = np.average([part.cs**2 for part in parts], weights=[part.energy for part in parts])
    assert np.sqrt(mean) == pytest.approx(cosine, rel=1e-5)


def test_near_equal_components_are_one_space_whatever_its_basis(two_layers: ws.Model) -> None:
    """Two singular values 0.1 % apart: turned among themselves they give the same space, score and tokens."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((256, 3)))[0] for _ in range(2))
    read, turn = two_layers.layer(1).head(0).qk, np.linalg.qr(rng.standard_normal((2, 2)))[0]
    turned = np.block([[turn, np.zeros((2, 1))], [np.zeros((1, 2)), np.ones((1, 1))]])
    for basis in (np.eye(3), turned):
        vo = Factored(left * (3, 2.998, 1), right)
        near = Factored((left @ basis) * (3, 2.998, 1), right @ basis)
        first, last = components(near, read)
        assert (first.named, last.named) == ("1-2", "3")
        assert first.cs == pytest.approx(components(vo, read)[0].cs, rel=1e-3)
    identity = Factored(np.eye(256)[:, :3] * (3, 2.998, 1), np.eye(256)[:, :3])
    channel = _channel(identity, Factored(np.eye(256), np.eye(256)))
    assert channel.space.shape == (256, 2) and channel.share == pytest.approx((9 + 2.998**2) / (10 + 2.998**2))
    (tokens,) = channel_tokens(two_layers, [channel.space])
    rows = np.concatenate([rows for _, rows in two_layers.unembedding.blocks()])
    assert " | " not in tokens and len(tokens.split(" ")) >= 5
    assert np.linalg.norm(rows[:, :2], axis=1).max() > 0


def test_a_zero_head_has_no_component(two_layers: ws.Model) -> None:
    zero = Factored(np.zeros((256, 4)), np.ones((256, 4)))
    assert components(zero, two_layers.layer(1).head(0).qk) == []
    channel = _channel(zero, two_layers.layer(1).head(0).qk)
    assert channel.component is None and channel.space.shape == (256, 0) and np.isnan(channel.share)
    assert channel_tokens(two_layers, [channel.space]) == [""]


def test_the_command_writes_the_components_that_a_head_reads(tmp_path: Path) -> None:
    result = run_undrawn("circuits", TWO_LAYERS, "--out", tmp_path, "--top", "2", "--reader", "1.3")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "components.csv").read_text().splitlines()
    assert lines[0] == "kind,from_layer,from_head,component,component_cs,usual_cs,share,cs"
    assert len(lines) == 1 + 3 * 8
    for reader, said in (("1", "a head is written as layer and number"), ("1.9", "no head 9: a layer has 8")):
        with pytest.raises(ws.CheckpointError, match=said):
            read_by(ws.open_model(TWO_LAYERS), reader)


@pytest.mark.check
def test_gpt2s_inhibition_heads_are_read_by_the_queries_of_the_name_mover() -> None:
    """S-inhibition heads 7.3, 7.9, 8.6, 8.10 and name mover 9.9 (Wang et al. 2023): one component of each stands out.

    They are among the first ten of the 108 earlier heads, each by a component with a score of at least 2.2 times the
    random 1/sqrt(d), and 1.6 times its own head's median.
    """
    table = read_by(ws.open_model(shared("gpt2-attention")), "9.9")
    queries = table.where(table["kind"] == "q")
    assert len(queries) == 108
    first = {
        (int(i), int(a)): row
        for row, (i, a) in enumerate(zip(queries["from_layer"], queries["from_head"], strict=True))
    }
    for head in ((7, 3), (7, 9), (8, 6), (8, 10)):
        row = first[head]
        assert row < 10
        assert queries["component_cs"][row] > 2.2 * 768**-0.5
        assert queries["component_cs"][row] > 1.6 * queries["usual_cs"][row]
        assert queries["component_cs"][row] > 1.5 * queries["cs"][row]
