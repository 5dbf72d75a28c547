"""What the analyses run on when nothing else is asked for: a checkpoint and texts that can be had here."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import weightscope as ws
from weightscope.cli.options import writable
from weightscope.text.sequences import read_documents


def out_option(folder: str) -> Callable[..., Any]:
    """--out, with its default."""
    return click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=folder, show_default=True, callback=writable,
        help="Folder for results.",
    )  # fmt: skip


device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="Where the model runs and the heavy products are computed.",
)  # fmt: skip
SHARED = Path(__file__).parent.parent.parent / "shared" / "data" / "text"
OPENWEBTEXT = "Skylion007/openwebtext"


def packaged(package: str, pattern: str) -> str:
    """A file or folder inside an installed package that carries weights; its name where it is not installed."""
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))), package)


def first_available(sources: Sequence[str], **options: str | None) -> ws.Model:
    """The first of several checkpoints that opens; what keeps the others from it is said in a line each.

    Raises
    ------
    CheckpointError
        None opens: the last one's error.
    """
    for source in sources[:-1]:
        try:
            return ws.open_model(source, **options)
        except ws.CheckpointError as error:
            click.echo(f"{error}; trying {sources[sources.index(source) + 1]}")
    return ws.open_model(sources[-1], **options)


def documents(paths: Sequence[str | Path], most: int = 2000) -> list[str]:
    """The documents of `paths`; where none are given, of ../shared, of OpenWebText, or of scikit-learn's own texts."""
    if paths:
        return read_documents(paths, most)
    if (SHARED / "books").is_dir():
        return read_documents([SHARED / "books"], most)
    try:
        return read_documents(openwebtext(1), most)
    except ws.CheckpointError as error:
        import sklearn.datasets

        described = sorted((Path(sklearn.datasets.__file__).parent / "descr").glob("*.rst"))
        click.echo(f"{error}: using scikit-learn's descriptions of data sets")
        return [path.read_text(encoding="utf-8") for path in described]


def openwebtext(shards: int) -> list[Path]:
    """The first Parquet files of OpenWebText, from the Hub or its cache.

    Raises
    ------
    CheckpointError
        They cannot be had.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # each of its retries would be said; what became of them is said once, by the error
    try:
        listed = HfApi().list_repo_files(OPENWEBTEXT, repo_type="dataset")
        names = sorted(name for name in listed if name.endswith(".parquet"))[:shards]
        files = [Path(hf_hub_download(OPENWEBTEXT, name, repo_type="dataset")) for name in names]
    except Exception as error:  # the client's own errors differ by version; none of them may surface as a traceback
        raise ws.CheckpointError(f"{OPENWEBTEXT} cannot be had from the Hub ({type(error).__name__})") from None
    if not files:
        raise ws.CheckpointError(f"{OPENWEBTEXT} holds no Parquet files")
    return files


def sts_sentences(paths: Sequence[str | Path]) -> list[str]:
    """The first sentence of every pair of STS-B: of the sts-*.csv given, or where nothing is, of ../shared's dev set.

    Returns
    -------
    list of str
        Empty where other text is given, or nothing is and the dev set is not there.

    Raises
    ------
    CheckpointError
        A file is missing or is not a table of tab-separated rows with the sentence in column 6.
    """
    found = [Path(path) for path in paths] or [path for path in [SHARED / "sts" / "sts-dev.csv"] if path.is_file()]
    if not all(path.name.startswith("sts-") and path.suffix == ".csv" for path in found):
        return []
    sentences = []
    for path in found:
        try:
            rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ws.CheckpointError(f"cannot be read: {error}", file=path) from None
        short = [number for number, row in enumerate(rows, 1) if len(row) < 7]
        if short:
            raise ws.CheckpointError(f"line {short[0]} has no two sentences in columns 6 and 7", file=path)
        sentences += [row[5] for row in rows]
    return sentences
