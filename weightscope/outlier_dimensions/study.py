"""The outlier dimensions of one model from sentences to a page: the command and the recipe are this with options."""

from pathlib import Path

from weightscope.folder import OutputFolder
from weightscope.model import Model
from weightscope.outlier_dimensions.measure import measure_outliers
from weightscope.outlier_dimensions.page import lead, write_report
from weightscope.runner import open_runner
from weightscope.runner.tokenizer import framing_of
from weightscope.text.inputs import Texts
from weightscope.text.kinds import token_kinds
from weightscope.text.sequences import sentence_sequences


def study_outliers(
    model: Model, texts: Texts, out: Path, *, sentences: int, sampled: int, longest: int, seed: int = 0,
    device: str = "cpu",
) -> str:  # fmt: skip
    """Run a model on sentences and write tables, figures and report.html.

    Parameters
    ----------
    model : Model
    texts : Texts
        Sentences; see `weightscope.text.inputs.read_sentences`.
    out : Path
        A folder, made where it is not there.
    sentences : int
        How many of them means are over.
    sampled : int
        How many of those eq. 7 is averaged over.
    longest : int
        Tokens of a sentence.
    seed : int
        Of the choice of sentences.
    device : str
        Where the model runs.

    Returns
    -------
    str
        The result in some sentences.

    Raises
    ------
    CheckpointError
        The model reads no texts or cannot be run, there are no sentences, or the folder cannot be written to.
    """
    framing = framing_of(model)
    sequences = sentence_sequences(framing, texts.texts, sentences, longest, seed)
    outliers = measure_outliers(open_runner(model, device=device), sequences, token_kinds(framing), sampled)
    with OutputFolder(out) as files:
        write_report(files, outliers, texts.source)  # a picture is there no later than the numbers
        outliers.write(files)
    return lead(outliers, texts.source)
