"""Convert a GGUF file to a folder of safetensors: its attention, norm and embedding matrices, dequantised.

    python -m analyses.gguf_to_safetensors MODEL.gguf FOLDER [--whole]

weightscope reads GGUF files directly. This is for other tools, which need Hugging Face's names and layout. It needs the
package `gguf`.
"""

from pathlib import Path

import click
from safetensors.numpy import save_file

from weightscope.checkpoint.opening import open_checkpoint
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder, check_writable
from weightscope.core.progress import bar
from weightscope.model.config.reading import as_published

MLP = ("mlp.", "post_attention_layernorm.")


def convert(gguf: Path, folder: Path, *, whole: bool = False) -> None:
    """Write config.json and model.safetensors of a GGUF file into a folder. `whole` includes the MLPs."""
    checkpoint = as_published(open_checkpoint(gguf))
    check_writable(folder)
    wanted = {name: tensor for name, tensor in checkpoint.items() if whole or not any(part in name for part in MLP)}
    tensors = {name: tensor.read() for name, tensor in bar(wanted.items(), "dequantising", "tensor", total=len(wanted))}
    files = Folder(folder)
    with files.open("model.safetensors") as file:
        save_file(tensors, file.name, metadata={"format": "pt"})
    files.json("config.json", dict(checkpoint.config))


@click.command("gguf-to-safetensors", cls=EndsInOneLine)
@click.argument("gguf", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--whole", is_flag=True, help="Include the MLPs, so that transformers can run the model.")
def main(gguf: Path, folder: Path, whole: bool) -> None:
    """Write GGUF's matrices into FOLDER under Hugging Face's names."""
    convert(gguf, folder, whole=whole)
    click.echo(f"{folder / 'model.safetensors'}")


if __name__ == "__main__":
    main()
