"""The command convert."""

from pathlib import Path

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import headline, print_tables


@command(
    "Write a pickled checkpoint of PyTorch as safetensors.",
    [
        "weightscope convert pytorch_model.bin --out converted/",
        "weightscope convert model/ --out converted/",
    ],
)
@click.argument("pickled", type=click.Path(path_type=Path))
@options.out
@options.json
def convert_command(pickled: Path, out: Path, as_json: bool) -> None:
    """Write the tensors of a pickled checkpoint (.bin, .pt, .pth, .ckpt) as safetensors, and run
    none of its code.

    PICKLED is a file, or a folder of transformers' shards. Every tensor is kept but an optimiser's,
    read again and compared; config and tokenizer files are copied along. Needs PyTorch.
    """
    from weightscope.runner.convert import convert

    result = convert(pickled, out)
    if as_json:
        rows = [
            {"name": name, "dtype": dtype, "shape": str(list(shape))}
            for name, (dtype, shape) in result.tensors.items()
        ]
        left_out = [{"name": name} for name in result.left_out]
        print_tables(result.lead, (), tensors=rows, left_out=left_out)
        return
    headline(result.lead)
    click.echo(result.file)
