"""Every command over every fixture, as a user types it: it ends well with numbers, or in one line that says why not."""

import re
from pathlib import Path

import pytest

from tests.support.commands import commands, is_one_line, run, studies, with_tokenizer, write_counts
from tests.support.figures import undrawn, unsaved
from tests.support.provenance import ends_with
from tests.support.slow import mostly_checked
from tests.support.tiny_models import NAMES, fixture

pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")

NOT_A_NUMBER = re.compile(r"(?<![\w.])[-+]?(nan|inf|infinity)(?![\w.])", re.IGNORECASE)
DRAWN = ("gpt2", "electra", "smollm3")  # with their figures; of all of them that would take a minute
ALWAYS = ("inspect", "audit", "compare", "circuits")  # end well whatever the family


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counts(with_tokenizer("gpt2", tmp_path_factory.mktemp("counts")))


@pytest.mark.parametrize("name", mostly_checked(NAMES, fast=["gpt2", "llama"], share=6))
def test_every_command_ends_with_numbers_or_one_line(name: str, counts: Path, tmp_path: Path) -> None:
    tiny = fixture(name)
    source = with_tokenizer(name, tmp_path / "source")
    options = ["--tower", tiny.case.tower] if tiny.case.tower else []
    with unsaved() if name in DRAWN else undrawn():
        for command, arguments in commands(source, counts, tmp_path / "out", *options).items():
            result = run(*arguments)
            described = f"{command}: {result.output} {result.exception!r}"
            if command in ALWAYS or result.exit_code == 0:
                assert result.exit_code == 0, described
                assert not NOT_A_NUMBER.search(result.stdout), described
                pages = list((tmp_path / "out" / command).glob("*.html"))
                assert pages or command in ("inspect", "neighbours"), described
                for page in pages:
                    ends_with(page, arguments, source)
            else:
                assert is_one_line(result), described
                assert not (tmp_path / "out" / command).exists(), described


@pytest.mark.check
@pytest.mark.parametrize("name", ["gpt2", "bert", "electra", "vit", "clip_text", "smollm3"])
def test_a_model_that_cannot_be_run_is_refused_in_one_line(name: str, counts: Path, tmp_path: Path) -> None:
    """Fixtures have no feed-forward networks, and vision models read no text."""
    pytest.importorskip("torch", reason="PyTorch comes with the extra `runner`")
    tiny = fixture(name)
    source = with_tokenizer(name, tmp_path / "source")
    options = ["--tower", tiny.case.tower] if tiny.case.tower else []
    for command, arguments in studies(source, counts.parent / "corpus.txt", tmp_path, *options).items():
        result = run(*arguments)
        assert is_one_line(result), f"{command}: {result.output} {result.exception!r}"
        assert not (tmp_path / command).exists()
