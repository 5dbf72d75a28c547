"""A head that the config ties to the embedding and the file holds with other values is never passed over."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES
from weightscope.heads.tensors.tied_head import overwritten_head, tie_holds

TOKENS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def written(folder: Path, *, tied: bool, head: float | None, last_row: float = 1.0) -> Path:
    """A tiny Qwen2 whose head is its embedding times a number; without one where that is None."""
    shutil.copytree(FIXTURES / "qwen2", folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights.pop(HEAD, None)
    if head is not None:
        weights[HEAD] = head * weights[TOKENS]
        weights[HEAD][-1] *= np.float32(last_row)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("tied", "head", "holds"), [
    (True, None, True), (True, 1.0, True), (False, 1.0, True), (True, 2.0, False), (False, 2.0, False),
    (False, None, None),
])  # fmt: skip
def test_a_tie_holds_in_the_weights_or_by_the_config_alone(
    tied: bool, head: float | None, holds: bool | None, tmp_path: Path
) -> None:
    model = ws.open_model(written(tmp_path / "model", tied=tied, head=head))
    assert tie_holds(model) is holds
    assert bool(overwritten_head(model)) == (tied and holds is False)


def test_inspect_and_audit_say_that_readers_differ_on_the_head(tmp_path: Path) -> None:
    saved = written(tmp_path / "saved", tied=True, head=2.0)
    shown = run("inspect", saved).stdout
    assert HEAD in shown
    assert "4.56 and older overwrite it" in shown
    kinds = [finding.kind for finding in ws.audit(saved).findings]
    assert "overwritten_head" in kinds
    for tied, head in ((True, 1.0), (True, None), (False, 2.0)):
        other = written(tmp_path / f"{tied} {head}", tied=tied, head=head)
        assert "overwrite" not in run("inspect", other).stdout
        assert "overwritten_head" not in [finding.kind for finding in ws.audit(other).findings]


def test_one_row_of_the_head_is_enough_for_an_audit(tmp_path: Path) -> None:
    saved = written(tmp_path / "saved", tied=True, head=1.0, last_row=1.5)
    assert "overwritten_head" in [finding.kind for finding in ws.audit(saved).findings]


def test_a_head_that_only_some_readers_keep_leaves_same_undecided(tmp_path: Path) -> None:
    untied = written(tmp_path / "untied", tied=False, head=2.0)
    saved = written(tmp_path / "saved", tied=True, head=2.0)
    for a, b in ((untied, saved), (saved, untied)):
        result = run("same", a, b)
        assert result.exit_code not in (0, 2)
        assert "undecided: tie_word_embeddings" in result.stdout.splitlines()[0]
        assert "4.56 and older overwrite it" in result.stdout
    assert ws.same(saved, saved).verdict == "same bytes"


@pytest.mark.parametrize(
    "pair", [((True, None), (False, 1.0)), ((True, 1.0), (False, 1.0)), ((True, None), (True, 1.0))]
)
def test_a_tie_that_holds_leaves_the_verdict(pair: tuple[tuple[bool, float | None], ...], tmp_path: Path) -> None:
    a, b = (written(tmp_path / str(i), tied=tied, head=head) for i, (tied, head) in enumerate(pair))
    assert ws.same(a, b).verdict == ws.same(b, a).verdict == "same values"
