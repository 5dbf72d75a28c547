"""`compare` names what was done: layers copied or swapped, one direction removed, edits of quantised weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.embedded_heads import permuted, real
from tests.support.figures import undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.pairs.changes.all_tensors import compare_tensors
from weightscope.pairs.compare.compare import Comparison
from weightscope.pairs.deeds.deed import What
from weightscope.pairs.deeds.directions import first_directions
from weightscope.report.findings import Finding, Member

Weights = dict[str, np.ndarray]
D, LAYERS = 64, 6
RNG = np.random.default_rng(7)
DIRECTION = np.linalg.qr(RNG.standard_normal((D, 1)))[0][:, 0].astype(np.float32)


@pytest.fixture(scope="module")
def base() -> Weights:
    return gpt2_weights(n_layers=LAYERS, d=D, vocab=50)


def part(weights: Weights, layer: int) -> Weights:
    """The attention of one layer, by the rest of its tensors' names; the norm before it is the layer's own."""
    stem = f"h.{layer}.attn."
    return {name.removeprefix(stem): weights[name] for name in weights if name.startswith(stem)}


def place(weights: Weights, layer: int, tensors: Weights) -> None:
    weights.update({f"h.{layer}.attn.{name}": tensor.copy() for name, tensor in tensors.items()})


def compared(folder: Path, base: Weights, change: Callable[[Weights], None], **options: bool) -> Comparison:
    after = {name: tensor.copy() for name, tensor in base.items()}
    change(after)
    paths = [write_checkpoint(folder / name, weights) for name, weights in (("a", base), ("b", after))]
    return ws.compare(*map(ws.open_model, paths), **options)


def of_kind(comparison: Comparison, *kinds: str) -> list[Finding]:
    return [finding for finding in comparison.findings if finding.kind in kinds]


def test_layer_that_became_a_copy_is_a_finding(base: Weights, tmp_path: Path) -> None:
    comparison = compared(tmp_path, base, lambda w: place(w, 4, part(base, 2)))
    (finding,) = of_kind(comparison, "copied_layer", "swapped_layers")
    assert (finding.kind, finding.layer, finding.items, finding.severity) == ("copied_layer", 4, (2,), "warning")
    assert "a copy of layer 2" in finding.text and comparison.findings.that_fail(["copied_layer"]) == [finding]


def test_swapped_layers_are_one_finding_and_a_copy_another(base: Weights, tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        for layer, source in ((1, 3), (3, 1), (5, 3)):
            place(weights, layer, part(base, source))

    findings = of_kind(compared(tmp_path, base, change), "copied_layer", "swapped_layers")
    by_kind = {finding.kind: finding for finding in findings}
    assert by_kind["swapped_layers"].items == (1, 3) and by_kind["copied_layer"].layer == 5
    assert "1 was 3, 3 was 1" in by_kind["swapped_layers"].text


def test_layers_in_a_circle_are_in_another_order(base: Weights, tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        for layer, source in ((0, 2), (2, 5), (5, 0)):
            place(
                weights,
                layer,
                {name: w.astype(np.float16).astype(np.float32) for name, w in part(base, source).items()},
            )

    (finding,) = of_kind(compared(tmp_path, base, change), "copied_layer", "swapped_layers")
    assert finding.items == (0, 2, 5) and "0 was 2, 2 was 5, 5 was 0" in finding.text


def test_layers_that_moved_are_not_called_copies(base: Weights, tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        for layer in range(LAYERS):
            place(weights, layer, {name: 1.1 * w for name, w in part(base, layer).items()})

    assert not of_kind(compared(tmp_path, base, change), "copied_layer", "swapped_layers")


def remove(strength: float, layers: range) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for layer in layers:
            for name in (f"h.{layer}.attn.c_proj.weight", f"h.{layer}.mlp.c_proj.weight"):
                if name in weights:
                    weights[name] -= np.float32(strength) * np.outer(weights[name] @ DIRECTION, DIRECTION)

    return change


@pytest.mark.parametrize("all_tensors", [False, True])
@pytest.mark.parametrize(
    ("strength", "kind"),
    [
        (1.0, "removed_direction"),
        (0.5, "removed_direction"),
        (1.3, "removed_direction"),
        (2.0, "removed_direction"),
        (-2.0, "shared_direction"),
    ],
)
def test_edits_along_one_direction_are_one_finding(base: Weights, tmp_path: Path, strength, kind, all_tensors) -> None:
    comparison = compared(tmp_path, base, remove(strength, range(1, 5)), all_tensors=all_tensors)
    (finding,) = of_kind(comparison, "removed_direction", "shared_direction")
    assert finding.kind == kind and finding.severity == "warning"
    expected = strength if kind == "removed_direction" else 1 - strength  # taken away; left
    assert finding.number == pytest.approx(expected, abs=1e-3)
    assert {member.layer for member in finding.members} == {1, 2, 3, 4} and "layers 1-4" in finding.text
    if all_tensors:
        assert "LoRA" not in comparison.lead and "along one direction" in comparison.lead


@pytest.mark.parametrize("half", [0, 0x8000], ids=["cut off", "rounded"])
@pytest.mark.parametrize("all_tensors", [False, True])
def test_removed_direction_is_found_through_bfloat16(base: Weights, tmp_path: Path, all_tensors, half) -> None:
    def change(weights: Weights) -> None:
        remove(1.0, range(LAYERS))(weights)
        for name in weights:
            weights[name] = ((weights[name].view(np.uint32) + half) & np.uint32(0xFFFF0000)).view(np.float32)

    comparison = compared(tmp_path, base, change, all_tensors=all_tensors)
    (finding,) = of_kind(comparison, "removed_direction", "shared_direction")
    layers = [member.name.split(".")[1] if member.name else member.index for member in finding.members]
    assert finding.kind == "removed_direction" and len(set(layers)) == LAYERS


def test_edits_along_different_directions_are_no_finding(base: Weights, tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        for layer in range(LAYERS):
            name = f"h.{layer}.attn.c_proj.weight"
            weights[name] += np.outer(RNG.standard_normal(D), RNG.standard_normal(D)).astype(np.float32)

    comparison = compared(tmp_path, base, change, all_tensors=True)
    assert not of_kind(comparison, "removed_direction", "shared_direction")
    assert "changed by a matrix of low rank (rank 1)" in comparison.lead


def test_first_direction_equals_the_svds() -> None:
    a = RNG.standard_normal((90, 40))
    u, s, vt = np.linalg.svd(RNG.standard_normal((90, 40)), full_matrices=False)
    change = (u * [5.0, *(1e-3 * s[1:])]) @ vt
    share, left, right = first_directions(lambda: zip(np.split(a, 3), np.split(a + change, 3), strict=True))
    assert share == pytest.approx(1, abs=1e-3)
    assert abs(left.direction @ u[:, 0]) == pytest.approx(1) and abs(right.direction @ vt[0]) == pytest.approx(1)
    assert right.left == pytest.approx(np.linalg.norm((a + change) @ vt[0]) / np.linalg.norm(a @ vt[0]), rel=1e-3)
    assert left.left == pytest.approx(np.linalg.norm(u[:, 0] @ (a + change)) / np.linalg.norm(u[:, 0] @ a), rel=1e-3)


def test_low_rank_edit_of_quantised_weights_is_low_rank(tmp_path: Path) -> None:
    """Weights that were dequantised: 15 values in a block of 32. The edit leaves the grid, which is no quantisation."""
    base = gpt2_weights(n_layers=2, d=128, vocab=50)
    name = "h.1.attn.c_proj.weight"
    blocks = base[name].reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 7
    base[name] = (np.rint(blocks / scale) * scale).reshape(128, 128).astype(np.float32)
    after = base | {name: base[name] + np.outer(*RNG.standard_normal((2, 128))).astype(np.float32) / 300}
    models = [ws.open_model(write_checkpoint(tmp_path / which, w)) for which, w in (("a", base), ("b", after))]
    (change,) = (change for change in compare_tensors(*models).changes if change.kind is not What.IDENTICAL)
    assert (change.name, change.kind.value, change.rank) == (name, "low rank", 1)


def test_farthest_head_has_the_largest_change(base: Weights, tmp_path: Path) -> None:
    """Where few heads moved, the others' change is 0, which no change can be divided by."""

    def change(weights: Weights) -> None:
        for head, factor in ((0, 1.01), (2, 1.2)):
            columns = slice(2 * D + 16 * head, 2 * D + 16 * head + 16)  # values of heads of 16
            weights["h.3.attn.c_attn.weight"][:, columns] *= np.float32(factor)

    comparison = compared(tmp_path, base, change)
    (finding,) = of_kind(comparison, "moved_most")
    assert comparison.moved_most(1)["head"].tolist() == [2] and finding.number == pytest.approx(0.2, rel=1e-4)
    assert "2 of 4 heads (0, 2), the farthest head 2: W_VO changed by 0.2" in finding.text


def test_new_places_and_roles_are_named_once(tmp_path: Path) -> None:
    paths = [
        write_checkpoint(tmp_path / which, weights, n_head=8)
        for which, weights in (("a", real()), ("b", permuted(real(), 1, [1, 0, *range(2, 8)])))
    ]
    (finding,) = ws.compare(*map(ws.open_model, paths)).findings
    assert str(finding).count("0 is now 1") == 1 and finding.where == "layer 1 heads 0-1"
    members = (Member("head", 7, name="induction"), Member("head", 8, name="induction"), Member("head", 7, 3, "like"))
    pair = Finding(kind="alike_heads", layer=18, head=7, measure="", number=1.0, text="", members=members)
    assert pair.where == "layer 18 head 7 (induction)"


def test_checkpoints_of_other_sizes_are_referred_to_lineage(tmp_path: Path) -> None:
    shapes = {"one": gpt2_weights(3, 24), "two": gpt2_weights(2, 48)}
    paths = [write_checkpoint(tmp_path / name, weights, n_head=4) for name, weights in shapes.items()]
    with undrawn():
        result = run("compare", *paths, "--out", tmp_path / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    for words in (
        "3 and 2 layers",
        "6 and 12 dimensions in a head",
        "24 and 48 dimensions in the stream",
        "`weightscope lineage ",
    ):
        assert words in result.stderr
    assert "4 and 4 heads" not in result.stderr
