"""Compare rows with transformers' renaming of tensors: is a file read alike under either of its spellings?

    python -m tests.census.spellings [TYPE ...] [--out tests/census/spellings.csv] [--against [FILE.csv]]

`conversion_mapping.py` renames, merges, splits and transposes what a published file has, and `save_pretrained` takes
that back. Without (`save_original_format=False`, or a state_dict) a file has the names of memory, which transformers
loads too. A tiny random model of each type with such rules is saved both ways, and everything that weightscope reads of
the two is compared: heads, and tensors by role. Rules that neither file meets are listed.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import weightscope as ws
from tests.census.census import NOT_COMPARED
from tests.census.classes import contents
from tests.census.judge import readings
from tests.census.spelling_record import (
    ALIKE,
    OTHERWISE,
    RECORD,
    REFUSED,
    UNNAMED,
    UNREAD,
    WRONG,
    Line,
    differences,
    write,
    written,
)
from weightscope.adopting.comparison import line_of
from weightscope.adopting.config_keys import tiny_config
from weightscope.adopting.newcomers import OutOfTime, limited_time, model_types
from weightscope.adopting.tiny_models import PLANS, SIZES, build, class_and_line
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.core.files import scratch_folder
from weightscope.model.rows.table import title

SAME = {"deepseek_ocr2_sam.vision": "sam_vision.vision"}  # rows of the two spellings of one stack
COUNTS = (9, 10, 13, 14)  # tokens: of a text, or a square of patches behind others
TOLERANCE = 1e-4  # of scores and values, relative to the largest
LISTED = 4  # rules and stacks that a line names


@dataclass(frozen=True)
class Reading:
    """Everything that is read of one file."""

    layers: Mapping[tuple[str, int], Any]  # by stack and index: a layer, or the message that refuses it
    roles: Mapping[str, int]  # a print of each tensor's numbers, by its place
    unnamed: int
    problem: str


def reading(folder: Path) -> Reading:
    """What weightscope reads of a file."""
    models, problem, _ = readings(folder)
    stacks, seen = dict[str, ws.Model](), set[tuple[str, str]]()
    for model in models:
        name = SAME.get(title(model.family), title(model.family))
        if (name, model.prefix) not in seen:  # one is opened twice, by name and as the file's own
            seen.add((name, model.prefix))
            stacks[f"{name}{' again' * sum(one.startswith(name) for one in stacks)}"] = model
    layers: dict[tuple[str, int], Any] = {}
    for name, model in stacks.items():
        for index in model.attention_layers:
            try:
                layers[name, index] = model.layer(index)
            except CheckpointError as error:
                layers[name, index] = line_of(error, folder)
    roles, unnamed = _roles(models[0]) if models else ({}, 0)
    return Reading(layers, roles, unnamed, problem)


def _roles(model: ws.Model) -> tuple[dict[str, int], int]:
    """Prints of tensors by place, parts of fused ones and experts each; how many tensors have no role."""
    prints: dict[str, int] = {}
    tensors = model.tensors
    for tensor in tensors:
        for part in (tensors.parts(tensor) or (tensor,)) if tensor.has_role else ():
            for one in part.experts or (part,):
                try:
                    prints[f"{one.stack}: {tensors.label(one)}"] = hash(one.array().tobytes())
                except CheckpointError:  # a latent's, or of another width
                    continue
    return prints, sum(not tensor.has_role for tensor in tensors)


def line(kind: str) -> Line | None:
    """The comparison of a type; None where transformers renames nothing of it."""
    model = _tiny(kind)
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if not rules:
        return None
    with scratch_folder() as saved, scratch_folder() as in_memory:
        model.save_pretrained(saved)
        model.save_pretrained(in_memory, save_original_format=False)
        names, others = ({*open_checkpoint(Path(folder))} for folder in (saved, in_memory))
        if names == others:
            return None
        unmet = [
            str(rule.source_patterns[0])
            for rule in rules
            if type(rule) is WeightRenaming and not any(rule.rename_source_key(name)[1] for name in names | others)
        ]
        verdict, reason = _verdict(reading(Path(saved)), reading(Path(in_memory)))
    first = [min(one - two, default="") for one, two in ((names, others), (others, names))]
    return Line(kind, verdict, reason, *first, _few(unmet))


def _tiny(kind: str) -> Any:
    """A tiny random model of a type, by the first plan that is built."""
    config, problem = CONFIG_MAPPING[kind](), None
    for plan in PLANS:
        try:
            return build(tiny_config(config, SIZES[0], plan), 1)
        except OutOfTime:
            raise
        except Exception as error:  # whatever transformers raises of an inconsistent config
            problem = problem or error
    raise ValueError(class_and_line(problem)) if problem else ValueError("no plan")


def _verdict(saved: Reading, in_memory: Reading) -> tuple[str, str]:
    """A verdict on a file under names of memory, held against the saved one."""
    if not any(not isinstance(layer, str) for layer in (*saved.layers.values(), *in_memory.layers.values())):
        return UNREAD, saved.problem or "no stack is read"
    wrong, refused = [], []
    for place, layer in saved.layers.items():
        twin = in_memory.layers.get(place, in_memory.problem or "no row reads this stack")
        if isinstance(layer, str) and isinstance(twin, str):
            continue
        if isinstance(layer, str):
            refused.append(f"as saved: {layer}")
        elif isinstance(twin, str):
            refused.append(f"in memory: {twin}")
        elif not _same(layer, twin):
            wrong.append(f"{place[0]} layer {place[1]}")
    if wrong:
        return WRONG, _few(wrong)
    if refused:
        return REFUSED, refused[0]
    elsewhere = [place for place, print_ in saved.roles.items() if in_memory.roles.get(place, print_) != print_]
    if elsewhere:  # of heads that are read alike: rows of queries and keys in another order, say
        return OTHERWISE, _few(elsewhere)
    more = in_memory.unnamed - saved.unnamed
    missing = [place for place in saved.roles if place not in in_memory.roles]
    if more > 0 and missing:
        return UNNAMED, _few(missing)
    return ALIKE, ""


def _same(layer: Any, other: Any) -> bool:
    """Whether two layers compute the same: the same arrays, or else the same scores and values of random tokens."""
    if contents(layer) == contents(other):
        return True
    if (layer.d_model, layer.n_heads, layer.cross) != (other.d_model, other.n_heads, other.cross) or layer.cross:
        return False
    for count in COUNTS:
        x = np.random.default_rng(0).standard_normal((count, layer.d_model)).astype(np.float32)
        with suppress(CheckpointError):  # patches that are no square
            pairs = ((layer.scores(x), other.scores(x)), (layer.values(x), other.values(x)))
            return all(np.abs(one - two).max() <= TOLERANCE * np.abs(one).max() for one, two in pairs)
    return False


def _few(words: Sequence[str]) -> str:
    more = f" and {len(words) - LISTED} more" if len(words) > LISTED else ""
    return ", ".join(words[:LISTED]) + more


def compared(kinds: Sequence[str]) -> Iterator[Line]:
    """One line for each type that transformers renames; those that cannot be built are left out."""
    for kind in kinds:
        if kind in NOT_COMPARED:
            continue
        try:
            with limited_time():
                found = line(kind)
        except (Exception, OutOfTime):  # whatever transformers raises; the census says why
            continue
        if found is not None:
            yield found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.census.spellings", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model_types; all that transformers builds by default")
    parser.add_argument("--out", type=Path, help="a CSV file for the lines")
    parser.add_argument("--against", nargs="?", type=Path, const=RECORD, help="say what differs from a record")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    lines = []
    for found in compared(options.types or model_types()):
        lines.append(found)
        print(f"{found.type:28} {found.verdict:8} {found.reason}", flush=True)
    if options.out:
        write(lines, options.out)
    new = differences(written(options.against), lines) if options.against else []
    print("\n".join(new))
    return int(bool(new) or any(each.verdict == WRONG for each in lines))


if __name__ == "__main__":
    sys.exit(main())
