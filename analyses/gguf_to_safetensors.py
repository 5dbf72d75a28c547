"""A GGUF file as a folder of safetensors: its attention, norm and embedding matrices, dequantised.

    python analyses/gguf_to_safetensors.py MODEL.gguf FOLDER [--whole]

weightscope opens a GGUF file as it is; this is for whatever else wants Hugging Face's names and layout. Needs the
`gguf` package.
"""

import json
import sys
from pathlib import Path

import click
from safetensors.numpy import save_file

from weightscope import CheckpointError
from weightscope.checkpoint import open_checkpoint

MLP = ("mlp.", "post_attention_layernorm.")


def convert(gguf: Path, folder: Path, *, whole: bool = False) -> None:
    """Write config.json and model.safetensors of a GGUF file into a folder.

    Parameters
    ----------
    gguf, folder : Path
    whole : bool
        The MLPs too, so that transformers can run the model.

    Raises
    ------
    CheckpointError
        The file is not right, or of an architecture that is not read.
    """
    checkpoint = open_checkpoint(gguf)
    tensors = {
        name: tensor.read() for name, tensor in checkpoint.items() if whole or not any(part in name for part in MLP)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=1))


@click.command()
@click.argument("gguf", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--whole", is_flag=True, help="The MLPs too, so that transformers can run the model.")
def main(gguf: Path, folder: Path, whole: bool) -> None:
    """Write GGUF's matrices into FOLDER under Hugging Face's names."""
    try:
        convert(gguf, folder, whole=whole)
    except CheckpointError as error:
        click.echo(f"gguf-to-safetensors: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
