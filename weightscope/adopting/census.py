"""Check every attention stack of every architecture that transformers has: does weightscope read it exactly?

    python -m weightscope.adopting.census [TYPE ...] [--out FILE.csv] [--page FILE.md] [--against [FILE.csv]]

`--against` reports what a newer transformers adds and which verdicts changed.

For each type, two tiny random models are built and run (`tiny_models`, `hooks`), saved, opened by weightscope and
compared (`judge`). A stack is exact if it is exact in both models, which differ in size, seed and first position.
"""

import argparse
import ctypes
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.adopting.classes import layers_read, through_other_classes
from weightscope.adopting.config_keys import tiny_config, varied
from weightscope.adopting.hooks import Observed, observe
from weightscope.adopting.judge import Stored, Verdict, judge, names_at_work, readings, stacks
from weightscope.adopting.record import Row, changes, page, read, write
from weightscope.adopting.tiny_models import (
    HEADS,
    NOT_COMPARED,
    PLANS,
    SIZES,
    Size,
    build,
    classes_of,
    first_line,
    without_attention,
)
from weightscope.architectures import FAMILIES
from weightscope.architectures.table import RECORD
from weightscope.files import new_file, scratch_folder

SECONDS = 100  # of a processor, for a type
MOST_MEMORY = 12 << 30
MOST_CLASSES = 3  # built in the search for one that attends
MOST_PLANS = 3  # tried after one that runs, for the sake of parts that do not
ORDER = ("WRONG", "refused", "unseen", "exact")  # of verdicts, the worst first
FAR = 37  # where the second text begins
# Sizes, seed and first position of the two models of a type, and whether its config has other numbers.
TRIALS = ((SIZES[:1], 1, 0, False), (SIZES[1:], 2, FAR, True))


class OutOfTime(BaseException):
    """A type took longer than `SECONDS`; what catches errors of transformers lets it pass."""


def model_types() -> list[str]:
    """Every model_type whose config some auto class builds a model of, and every other one that a row reads."""
    autos = [getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel", None) for head in HEADS]
    kinds, read_types = [], {kind for row in FAMILIES for kind in row.types}
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]
        except (AttributeError, ImportError):  # named, but not there without other packages
            continue
        if kind in read_types or any(auto is not None and config in auto._model_mapping for auto in autos):
            kinds.append(kind)
    return sorted(kinds)


def newcomers() -> list[str]:
    """The model_types that the installed transformers builds and the committed census does not know."""
    return sorted({*model_types()} - {row.type for row in read()})


def at_work(
    config: Any, sizes: Sequence[Size], seed: int, start: int, other: bool = False
) -> tuple[Any, list[Observed]]:  # fmt: skip
    """A tiny model of a config and its attention layers at work: with the first and boldest sizes that it runs with.

    With `other` numbers in its config, if it runs with them.
    """
    if other:
        with suppress(Exception):  # whatever transformers raises of numbers that do not go together
            return at_work(type(config).from_dict(varied(config.to_dict())), sizes, seed, start)
    problems: list[str] = []
    best: tuple[Any, list[Observed]] | None = None
    left = MOST_PLANS * len(sizes)
    for plan, size in product(PLANS, sizes):
        if not left:
            break
        left -= best is not None
        try:
            model, observed, unseen = _attending(tiny_config(config, size, plan), size, seed, start)
        except Exception as error:  # whatever a config raises that does not fit together
            problems.append(first_line(error))
            continue
        if observed and (best is None or len(stacks(observed)) > len(stacks(best[1]))):
            best = model, observed
        if best and not unseen:
            break
        problems += unseen
    if best is None:
        raise ValueError(problems[0].removeprefix("ValueError: ") if problems else "no attention is computed")
    return best


def _attending(config: Any, size: Size, seed: int, start: int) -> tuple[Any, list[Observed], list[str]]:
    """A model of the first class that attends, its layers at work and what did not run; else of the first class."""
    first: tuple[Any, list[Observed], list[str]] | None = None
    for kind in classes_of(config)[:MOST_CLASSES]:
        with suppress(ValueError):  # this class cannot be built
            model = build(config, seed, [kind])
            seen = model, *observe(model, size, seed, start)
            if seen[1]:
                return seen
            first = first or seen
    if first is None:  # a later class can be built, or the error says why none can
        model = build(config, seed)
        first = model, *observe(model, size, seed, start)
    return first


def census(kind: str, config: Any = None) -> list[Row]:
    """The rows of one model_type."""
    by_stack: dict[str, list[Verdict]] = {}
    first: tuple[Any, dict[str, set[str]], int] | None = None
    late = f"takes longer than {SECONDS} s"
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
                first = first or (model, layers_read(models, names_at_work(observed, stored)), trial[1])
    except OutOfTime:
        return [Row(kind, verdict="not built", reason=late)]
    except Exception as error:  # whatever transformers raises
        if not by_stack:
            package = re.search(r"requires the (\w+) library", str(error))
            reason = f"needs the package {package[1]}" if package else first_line(error).removeprefix("ValueError: ")
            return [Row(kind, verdict="not built", reason=reason)]
    ran = {verdict.row for both in by_stack.values() for verdict in both if verdict.verdict != "unseen"}
    rows = [_together(kind, both) for both in by_stack.values()]
    rows = [row for row in rows if row.verdict != "unseen" or row.row not in ran]
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

    def too_long(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, too_long)
    try:
        for kind in kinds:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                rows = census(kind)
            except OutOfTime:
                rows = [Row(kind, verdict="not built", reason=f"takes longer than {SECONDS} s")]
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            yield from rows
            _give_back_memory()
    finally:
        signal.signal(signal.SIGPROF, before)


def _give_back_memory() -> None:
    """Return what is free to the system: glibc keeps it otherwise, ten gigabytes in a whole census."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m weightscope.adopting.census", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model_types; all that transformers builds by default")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    parser.add_argument("--page", type=Path, help="a page of it, docs/architectures.md")
    parser.add_argument(
        "--against", nargs="?", type=Path, const=RECORD,
        help="a census written before, by default the committed one: say what is new, and fail if less is exact",
    )  # fmt: skip
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))  # what needs more is not tiny
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows, began = [], time.monotonic()
    for row in run(options.types or model_types()):
        rows.append(row)
        print(f"{row.type:28} {row.verdict:9} {row.kind:6} {row.layers} {row.stack}  {row.reason}", flush=True)
    if options.out:
        write(options.out, rows)
    if options.page:
        with new_file(options.page) as file:
            file.write(page(rows, transformers.__version__).encode())
    tally = Counter(row.verdict for row in rows)
    types = len({row.type for row in rows if row.stack})
    print(f"{types} types with {sum(bool(row.stack) for row in rows)} stacks: "
          + ", ".join(f"{count} {verdict}" for verdict, count in tally.most_common())
          + f"; {time.monotonic() - began:.0f} s")  # fmt: skip
    lines = changes(read(options.against), rows) if options.against else []
    print("\n".join(lines))
    return 1 if tally["WRONG"] or any(": exact -> " in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
