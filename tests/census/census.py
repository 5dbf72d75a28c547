"""The census of a model_type: which verdict each of its attention stacks gets."""

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.census.classes import layers_read, through_other_classes
from tests.census.judge import Verdict, judge, readings
from tests.census.record import Row
from tests.census.unnamed import Named, named
from weightscope.adopting.comparison import Stored, names_at_work
from weightscope.adopting.newcomers import OutOfTime, limited_time
from weightscope.adopting.tiny_models import class_and_line
from weightscope.adopting.trial import TRIALS, at_work
from weightscope.core.files import scratch_folder

ORDER = ("WRONG", "refused", "unseen", "exact")  # of verdicts, the worst first
CONVOLUTIONS = (
    "vibevoice_acoustic_tokenizer", "vibevoice_acoustic_tokenizer_encoder", "vibevoice_acoustic_tokenizer_decoder",
    "muse_spark_audio",
)  # fmt: skip
# By model_type: why there is no attention to compare.
NOT_COMPARED: Mapping[str, str] = {
    "mra": "its attention is a GPU kernel; without it transformers returns zeros",
    "autoformer": "its attention correlates whole sequences at a delay, without a score for a query and a key",
    **dict.fromkeys(CONVOLUTIONS, "has no attention: it convolves"),
    "swiftformer": "its attention has one weight a token, and no score for a query and a key",
    "glm_image_vqmodel": "transformers gives it no forward pass of its own",
    "gemma3n_vision": "needs the package timm",
    "gemma4_assistant": "its keys and values come from another model",
    "muse_glimmer_assistant": "its keys and values are of another model's states, and it runs with a cache alone",
    "yoso": "its attention hashes queries and keys, without a softmax",
    "reformer": "its attention hashes queries and keys, and divides by a sum of exponentials of its own",
    "squeezebert": "its attention has channels before tokens; a tiny model in tests/model/rows compares it",
}
ATTENTION = re.compile(r"[sS]oftmax\(|scaled_dot_product|ALL_ATTENTION|MultiheadAttention", re.ASCII)
PARTS = re.compile(r"Auto\w+\.from_config|load_backbone|from \.\.\w+\.modeling_", re.ASCII)


def census(kind: str, config: Any = None) -> list[Row]:
    """The rows of one model_type."""
    by_stack: dict[str, list[Verdict]] = {}
    first: tuple[Any, dict[str, set[str]], int] | None = None
    roles = Named(0, 0)
    try:
        config = CONFIG_MAPPING[kind]() if config is None and kind not in NOT_COMPARED else config
        if absent := NOT_COMPARED.get(kind) or without_attention(config):
            return [Row(kind, verdict="not built", reason=absent)]
        for trial in TRIALS:
            model, observed = at_work(config, *trial)
            with scratch_folder() as folder:
                model.save_pretrained(folder)
                stored, (models, problem, refusals) = Stored(model, folder), readings(folder)
                for verdict in judge(observed, stored, models, problem, refusals):
                    by_stack.setdefault(verdict.stack, []).append(verdict)
                roles = roles if first else named(models, Path(folder))
                first = first or (model, layers_read(models, names_at_work(observed, stored)), trial[1])
    except OutOfTime as error:
        return [Row(kind, verdict="not built", reason=str(error))]
    except Exception as error:  # whatever transformers raises
        if not by_stack:
            package = re.search(r"requires the (\w+) library", str(error))
            reason = (
                f"needs the package {package[1]}" if package else class_and_line(error).removeprefix("ValueError: ")
            )
            return [Row(kind, verdict="not built", reason=reason)]
    ran = {verdict.row for both in by_stack.values() for verdict in both if verdict.verdict != "unseen"}
    rows = [_together(kind, both) for both in by_stack.values()]
    rows = [row for row in rows if row.verdict != "unseen" or row.row not in ran]
    rows = [replace(row, tensors=roles.tensors, unnamed=roles.unnamed, where=roles.where) for row in rows]
    return rows if first is None else _by_classes(rows, *first)


def _together(kind: str, both: Sequence[Verdict]) -> Row:
    """The worst of what two models show of a stack; one that only one model shows is none that is exact."""
    worst = min(both, key=lambda one: ORDER.index(one.verdict))
    row = Row(kind, worst.stack, worst.kind, worst.layers, worst.verdict, worst.reason, worst.row)
    alone = worst.verdict == "exact" and len(both) < len(TRIALS)
    return replace(row, verdict="refused", reason="seen at one size only") if alone else row


def _by_classes(rows: Sequence[Row], model: Any, read: dict[str, set[str]], seed: int) -> list[Row]:
    """The rows, with how many public classes save each stack so that it is read alike; another reading is a verdict."""
    by_stack = {row.stack: row if row.verdict == "unseen" else replace(row, classes=1) for row in rows}
    with suppress(OutOfTime):
        for differences in through_other_classes(model, read, seed):
            for stack, difference in differences.items():
                row = by_stack[stack]
                if difference is None:
                    by_stack[stack] = replace(row, classes=row.classes + 1)
                elif ORDER.index(difference.verdict) < ORDER.index(row.verdict):
                    by_stack[stack] = replace(row, verdict=difference.verdict, reason=difference.reason)
    return list(by_stack.values())


def run(kinds: Sequence[str]) -> Iterator[Row]:
    """The census of these types, one after the other, each within its time."""
    for kind in kinds:
        try:
            with limited_time():
                rows = census(kind)
        except OutOfTime as error:
            rows = [Row(kind, verdict="not built", reason=str(error))]
        yield from rows
        _give_back_memory()


def _give_back_memory() -> None:
    """Return what is free to the system: glibc keeps it otherwise, ten gigabytes in a whole census."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def without_attention(config: Any) -> str:
    """Why there is no attention of a type to be seen, in words; empty if there may be."""
    spec = find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    source = spec.loader.get_source(spec.name) if spec and spec.loader else ""  # type: ignore[attr-defined]
    if not source or ATTENTION.search(source):
        return ""
    parts = [part for part in vars(config).values() if isinstance(part, transformers.PreTrainedConfig)]
    if PARTS.search(source) and not (parts and all(map(without_attention, parts))):
        return ""
    return "has no attention: its code takes no softmax"
