"""What the sinks of one model do, from inputs to a page: the command and the recipe are this with options."""

from pathlib import Path

from weightscope.folder import OutputFolder
from weightscope.model import Model
from weightscope.runner import open_runner
from weightscope.sinks.inputs import Inputs
from weightscope.sinks.mechanisms.observer import sink_mechanisms
from weightscope.sinks.mechanisms.page import mechanism_headline, write_mechanism_report


def study_mechanisms(model: Model, inputs: Inputs, out: Path, *, device: str = "cpu") -> list[str]:
    """Run a model on images or texts and write tables, figures and report.html.

    Parameters
    ----------
    model : Model
    inputs : Inputs
        See `weightscope.sinks.inputs.read_inputs`.
    out : Path
        A folder, made where it is not there.
    device : str
        Where the model runs.

    Returns
    -------
    list of str
        What it was run on, then the result, in lines.

    Raises
    ------
    CheckpointError
        The model cannot be run, or the folder cannot be written to.
    """
    sinks = sink_mechanisms(open_runner(model, device=device), inputs)
    with OutputFolder(out) as files:
        write_mechanism_report(files, sinks)  # a picture is there no later than the numbers
        sinks.write(files)
    return [inputs.note, *mechanism_headline(sinks)]
