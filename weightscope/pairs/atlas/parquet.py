"""All heads as one Parquet file, a row group per checkpoint; only this module needs pyarrow."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from weightscope.core.errors import CheckpointError

NEEDS = "heads.parquet needs pyarrow: pip install 'weightscope-attention[atlas]'"


def check_parquet() -> None:
    """Refuse a run whose table could not be written, before anything is read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise CheckpointError(NEEDS) from None


def write_parquet(
    file: BinaryIO, groups: Iterable[Mapping[str, Any]], facts: Mapping[str, str]
) -> int:
    """Write row groups one at a time and return the number of rows.

    A group is columns by name: arrays, or one text for all its rows; NaN and -1 are null. `facts`
    go into the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, rows = None, 0
    for group in groups:
        length = max(len(column) for column in group.values() if not isinstance(column, str))
        columns = {name: _column(pa, column, length) for name, column in group.items()}
        table = pa.table(columns).replace_schema_metadata(dict(facts))
        writer = writer or pq.ParquetWriter(file, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=max(1, length))
        rows += length
    if writer is not None:
        writer.close()
    return rows


def _column(pa: Any, column: str | np.ndarray | Sequence[str], length: int) -> Any:
    """A column as Arrow has it."""
    if isinstance(column, str):
        places = pa.array(np.zeros(length, np.int32))
        return pa.DictionaryArray.from_arrays(places, pa.array([column]))
    array = np.asarray(column)
    if array.dtype.kind == "f":
        return pa.array(array, mask=np.isnan(array))
    if array.dtype.kind == "i":
        return pa.array(array, mask=array == -1)
    return pa.array(array.tolist(), pa.string())
