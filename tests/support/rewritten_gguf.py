"""A GGUF file written again by the gguf package, with other values in some places."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np


def rewritten(
    source: Path,
    path: Path,
    *,
    tensors: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write all keys but some, and all tensors; those whose names end as given pass a function."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if (
            name.startswith("GGUF.")
            or name == "general.architecture"
            or name.removeprefix(f"{architecture}.") in without
        ):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for tensor in reader.tensors:
        array = np.array(tensor.data)
        for end, change in (tensors or {}).items():
            if tensor.name.endswith(end):
                array = change(array)
        writer.add_tensor(tensor.name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
