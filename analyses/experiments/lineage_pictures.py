"""Draw the lineage of a model that was made deeper, and of one whose layers come from two others.

    python -m analyses.experiments.lineage_pictures --model all-mpnet-base-v2/

OUT/upscaled: all layers but the last quarter, then all but the first (SOLAR), trained further (10 % of the norm, as
noise). OUT/merged: the first half of the layers of the model and the second half of a copy that was trained further by
30 % of its norm, with both as bases.
"""

import click

import weightscope as ws
from analyses.study import study
from tests.support.plants.derivations import DERIVATIONS, drifted
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from weightscope.core.files import Folder, scratch_folder

UPSCALED = "depth upscaled, then drift 10 %"
TUNED = 0.3  # of the norm


def halves(first: Weights, second: Weights) -> Weights:
    """The first half of the layers of one model and the second half of another's."""
    half = first.size("layers") // 2
    return first.but({part: w for part, w in second.parts.items() if part[0] is not None and part[0] >= half})


@study("lineage-pictures")
@click.option("--model", required=True, help="Folder, .safetensors or .gguf file, Hub id.")
def main(files: Folder, model: str) -> None:
    """Make both checkpoints, and write their lineages into OUT/upscaled and OUT/merged."""
    weights = read_weights(model)
    with scratch_folder() as scratch:
        made = {"base": weights, "tuned": drifted(weights, TUNED), "upscaled": DERIVATIONS[UPSCALED].change(weights)}
        made["merged"] = halves(weights, made["tuned"])
        for name, each in made.items():
            write_weights(each, scratch / name)
        for name, bases in (("upscaled", ["base"]), ("merged", ["base", "tuned"])):
            result = ws.lineage(scratch / name, [scratch / base for base in bases])
            result.write(files.path / name)
            click.echo(result.lead)


if __name__ == "__main__":
    main()
