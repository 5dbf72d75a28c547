"""What weightscope reads of a file that llama.cpp's converter wrote, compared with the checkpoint it was made from.

    python -m tests.model.rows.converted FOLDER docs/gguf.md

FOLDER is what `tests.model.rows.llama_cpp` wrote; the second argument is the page with the table.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

import weightscope as ws
from tests.census.classes import contents
from tests.support.converter import VERSION
from weightscope.checkpoint.gguf import header_of
from weightscope.core.errors import CheckpointError, printable
from weightscope.model.model import Model
from weightscope.pairs.same.multiplied import in_one_convention

ONE_UNIT = 2e-6  # numbers of a header are float32
LEFT_OUT = ("projector", "pooler")  # parts that the converter writes to other files, or nowhere
NOT_SAID = ("axes", "caveats", "stretched", "longest")  # sections of a rotation, which text does not see; long texts
PAGE = """# GGUF files by llama.cpp's converter

Tiny random models of every type that both transformers {transformers} and the converter of llama-cpp-python {converter}
know were converted in float32. Each file is opened, every tensor that has a role in the original checkpoint is compared
under that role, and every layer as it is computed with: rotations, scales, norms, windows.
**{equal} of {converted} converted types are equal, {refused} are refused, {wrong} wrong.**
{left} more types cannot be converted: the converter does not read what this version of transformers writes.
`python -m pytest tests/model/rows/test_llama_cpp.py -m ""` repeats it.

Some numbers have no key in the file, because llama.cpp takes them for granted, such as which layers of Gemma 3 use a
window; the tiny models have those values. `A_log` is equal up to the rounding of exp in float32.
A tensor that no row names keeps ggml's name.

| type | architecture in the file | verdict | roles equal | tensors without a role | reason |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    """A type's line of the table."""

    type: str
    architecture: str = ""
    verdict: str = "not converted"
    equal: int = 0
    unnamed: int = 0
    reason: str = ""

    def line(self) -> str:
        """In Markdown."""
        numbers = [self.equal, self.unnamed] if self.verdict in ("equal", "WRONG") else ["", ""]
        cells = [self.type, self.architecture, self.verdict, *map(str, numbers), self.reason.replace("|", "/")]
        return f"| {' | '.join(cells)} |\n"


def compared(folder: Path) -> Row:
    """A type's file against its checkpoint."""
    kind, file = folder.name, folder / "model.gguf"
    if not file.exists():
        return Row(kind, reason=printable((folder / "reason.txt").read_text())[:110])
    architecture = str(header_of(file)["general.architecture"])
    try:
        original = ws.open_model(folder)
        original = ws.open_model(folder, tower="text") if "text" in original.stacks else original
    except CheckpointError as error:
        return Row(kind, architecture, "refused", reason="the checkpoint too: " + short(error, folder))
    try:
        ours = ws.open_model(file)
        original = in_one_convention(original, ours)[0]
        unnamed = sum(tensor.role == tensor.name for tensor in ours.tensors)
        equal, problems = tensors_equal(original, ours)
    except CheckpointError as error:
        return Row(kind, architecture, "refused", reason=short(error, folder))
    problems += [*layers_differ(original, ours)]
    return Row(kind, architecture, "WRONG" if problems else "equal", equal, unnamed, "; ".join(problems[:2]))


def tensors_equal(original: Model, ours: Model) -> tuple[int, list[str]]:
    """How many roles of the original's own stack are equal, and what is wrong with the others."""
    equal, problems = 0, []
    for label in original.tensors.labels:
        tensor = original.tensors[label]
        is_left_out = tensor.role.split(".")[0] in LEFT_OUT
        if tensor.stack not in (None, original.tensors.own) or tensor.role == tensor.name or is_left_out:
            continue
        if label not in ours.tensors:
            if "+" not in tensor.role or not all(part in ours.tensors for part in parts(label, tensor.role)):
                problems.append(f"{label} is missing")
            continue  # fused in the original alone: its parts have labels of their own
        a, b = tensor.array(), ours.tensors[label].array()
        exponents = tensor.role == "mixer.A_log"  # ggml stores -exp(A_log), in float32
        if np.array_equal(a, b) or (exponents and np.allclose(np.exp(a), np.exp(b), rtol=2.0**-21, atol=0)):
            equal += 1
        else:
            problems.append(f"{label} differs")
    return equal, problems


def parts(label: str, role: str) -> Iterator[str]:
    """The labels of a fused tensor's parts: "layer 0 expert.gate+up" has "layer 0 expert.gate" and so on."""
    stem, bias = role.removesuffix(".bias"), ".bias" if role.endswith(".bias") else ""
    before = label.removesuffix(role) + stem[: stem.rfind(".") + 1]
    return (f"{before}{part}{bias}" for part in stem[stem.rfind(".") + 1 :].split("+"))


def layers_differ(original: Model, ours: Model) -> Iterator[str]:
    """Layers that are not computed alike, with a softmax or without one."""
    for layer in original.layers:
        try:
            theirs = ours.layer(layer.index)
        except CheckpointError as error:
            yield f"layer {layer.index} is refused: {error}"
            continue
        if place := difference(layer, theirs):
            yield f"layer {layer.index} has another {place}"
    for index in original.mixer_layers:
        if place := difference(original.mixer(index), ours.mixer(index)):
            yield f"the mixer of layer {index} has another {place}"


def difference(a: Any, b: Any, place: str = "") -> str:
    """Where two values first differ; empty where they are the same up to the precision of a header."""
    if isinstance(a, int | float | np.ndarray) and isinstance(b, int | float | np.ndarray):
        same = np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=ONE_UNIT, atol=0, equal_nan=True)
        return "" if same else place
    if type(a) is type(b) and is_dataclass(a):
        names = (cell.name for cell in fields(a) if cell.name not in NOT_SAID)
        return next(filter(None, (difference(getattr(a, name), getattr(b, name), name) for name in names)), "")
    if type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        return next(filter(None, (difference(*pair, place) for pair in zip(a, b, strict=True))), "")
    return "" if contents(a) == contents(b) else place


def short(error: CheckpointError, folder: Path) -> str:
    """A refusal in a cell of the table."""
    text = str(error).replace(f"{folder}/", "").removeprefix("model.gguf: ").removeprefix("model.safetensors: ")
    return printable(text.split("; read are")[0])[:110]


def page(rows: list[Row], transformers: str, converter: str) -> str:
    """The page with the table."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("equal", "refused", "WRONG")}
    converted = sum(counts.values())
    head = PAGE.format(
        transformers=transformers, converter=converter, equal=counts["equal"], refused=counts["refused"],
        wrong=counts["WRONG"] or "none is", converted=converted, left=len(rows) - converted,
    )  # fmt: skip
    return head + "".join(row.line() for row in rows)


def read_rows(path: Path) -> dict[str, str]:
    """Verdicts by type, of a page."""
    cells = [line.split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {first.removeprefix("| "): verdict for first, _, verdict, *_ in cells[2:]}


def main(folder: str, target: str) -> None:
    """Compare all and write the page."""
    import transformers

    rows = [compared(each) for each in sorted(Path(folder).iterdir()) if each.is_dir()]
    Path(target).write_text(page(rows, transformers.__version__, VERSION))


if __name__ == "__main__":
    main(*sys.argv[1:])
