"""Parquet files of documents, as OpenWebText's shards on the Hub are."""

import io
from collections.abc import Iterable

import pytest


def shard(texts: Iterable[str]) -> bytes:
    """A file of these documents."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet comes with the extra `bigrams`")
    import pyarrow

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": [*texts]}), file)
    return file.getvalue()
