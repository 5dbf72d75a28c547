"""The sentences of `same`, as a native reader would write them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import Weights, run, with_tokenizer
from weightscope.pairs.deeds.deed import UNTOUCHED, Deed, What
from weightscope.pairs.same.judge import Judged
from weightscope.pairs.same.sentences import coarser_lead, differing_part, function_lead


def judged(verdict: str, done: Deed, count: int) -> list[Judged]:
    return [Judged("q", i, None, f"q.{i}", f"q.{i}", verdict, done) for i in range(count)]


BF16, CUT = Deed(What.ROUNDED, "BF16"), Deed(What.ROUNDED, "BF16, cut off", made="A")
Q4_K = Deed(What.QUANTISED, dtype="Q4_K")


@pytest.mark.parametrize(("deeds", "same", "lead"), [
    ({BF16: 36}, 0, "copy is base, rounded. All 36 tensors were rounded to BF16 (to nearest even)."),
    ({CUT: 1}, 0, "base is copy, rounded. The one tensor was rounded to BF16 (cut off)."),
    ({Deed(What.ROUNDED_TWICE, "F16, then to F8_E4M3"): 2}, 1,
     "copy is base, rounded. Of 3 tensors, 2 were rounded to F16, then to F8_E4M3 and 1 has the same values."),
    ({Q4_K: 20, Deed(What.QUANTISED, dtype="Q6_K", first="BF16"): 3, Deed(What.ROUNDED, "F16"): 1}, 12,
     "copy is base, quantised. Of 36 tensors, 20 were quantised (Q4_K), 3 were rounded to BF16 and quantised (Q6_K), "
     "1 was rounded to F16 (to nearest even) and 12 have the same values."),
    ({Q4_K: 2, Deed(What.ROUNDED, "BF16", made="A"): 1}, 0,
     "copy is base, quantised in part. Of 3 tensors, 2 of copy were quantised (Q4_K) and 1 of base was rounded to "
     "BF16 (to nearest even)."),
])  # fmt: skip
def test_what_was_rounded_is_the_subject(deeds: dict[Deed, int], same: int, lead: str) -> None:
    verdict = "quantised" if Q4_K in deeds else "rounded"
    tensors = [each for deed, count in deeds.items() for each in judged(verdict, deed, count)]
    assert coarser_lead("base", "copy", verdict, tensors + judged("same values", UNTOUCHED, same), same) == lead


def test_one_tensor_that_differs_is_named_with_what_is_known_of_it() -> None:
    one = judged("different", Deed(What.FEW_ROWS, "rows", "2 of 256, from 5"), 1)
    assert differing_part(one, 50) == "1 of 50 tensors differs: q.0 by 'other values in some rows' (2 of 256, from 5)"
    assert (
        differing_part(judged("different", Deed(What.TRANSPOSED), 2), 9)
        == "2 of 9 tensors differ, all by 'transposed'; the worst is q.0"
    )


def test_what_made_up_for_each_other_is_named_once() -> None:
    changed = ["heads in another order"] * 4 + ["norms folded"]
    assert function_lead("a", "b", judged("same function", UNTOUCHED, 9), changed, "equal at 6 positions") == (
        "b computes what a does, with heads in another order and norms folded in 5 of 9 tensors: equal at 6 positions."
    )


def half(weights: Weights) -> None:
    for name, w in weights.items():
        weights[name] = w.astype(np.float16)


@pytest.mark.parametrize(("change", "lead"), [
    (None, "two/model is one/model: the weights and config.json hold the same bytes."),
    (half, "two/model is one/model, rounded. All "),
])  # fmt: skip
def test_folders_of_one_name_are_called_by_what_tells_them_apart(
    change: Callable[[Weights], None] | None, lead: str, tmp_path: Path
) -> None:
    a, b = with_tokenizer("llama", tmp_path / "one/model"), with_tokenizer("llama", tmp_path / "two/model", change)
    assert ws.same(a, b).lead.startswith(lead)
    assert ws.same(a, a).lead.startswith("A and B are both model: ")


def test_digests_have_a_line_of_their_own(tmp_path: Path) -> None:
    a = with_tokenizer("llama", tmp_path / "a")
    lines = run("same", a, a, "--digest").stdout.splitlines()
    assert [line.partition(": model.safetensors ")[0] for line in lines if "SHA" in line] == [
        "SHA-256 of A",
        "SHA-256 of B",
    ]


def test_a_missing_tokenizer_is_said_in_english(tmp_path: Path) -> None:
    a, b = with_tokenizer("llama", tmp_path / "a"), with_tokenizer("llama", tmp_path / "b")
    for file in b.glob("token*"):
        file.unlink()
    assert ws.same(a, b).tokens.lead == "The tokenizers were not compared: B has none next to its weights."
