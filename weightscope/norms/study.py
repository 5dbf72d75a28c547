"""The norm-based analysis of one model from texts to a page: the command and the recipe are this with options."""

from pathlib import Path

from weightscope.folder import OutputFolder
from weightscope.model import Model
from weightscope.norms.measure import measure_norms
from weightscope.norms.page import lead, write_report
from weightscope.runner import open_runner
from weightscope.runner.tokenizer import framing_of
from weightscope.text.inputs import Texts
from weightscope.text.kinds import token_kinds
from weightscope.text.sequences import paragraph_pairs


def study_norms(
    model: Model, texts: Texts, out: Path, *, sequences: int, longest: int, seed: int = 0, device: str = "cpu"
) -> list[str]:
    """Run a model on pairs of paragraphs and write tables, figures and report.html.

    Parameters
    ----------
    model : Model
    texts : Texts
    out : Path
        A folder, made where it is not there.
    sequences : int
        Pairs of paragraphs.
    longest : int
        Tokens of a sequence.
    seed : int
        Of the choice of texts, pairs and heads.
    device : str
        Where the model runs.

    Returns
    -------
    list of str
        The result in lines.

    Raises
    ------
    CheckpointError
        The model reads no texts or cannot be run, the texts have no pairs, or the folder cannot be written to.
    """
    framing = framing_of(model)
    pairs = paragraph_pairs(framing, texts.texts, sequences, longest, seed)
    norms = measure_norms(open_runner(model, device=device), pairs, token_kinds(framing), seed=seed)
    with OutputFolder(out) as files:
        write_report(files, norms, texts.source)  # a picture is there no later than the numbers
        norms.write(files)
    return [lead(norms, texts.source), norms.kinds.text()]
