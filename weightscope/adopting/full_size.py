"""Comparison of rows with the checkpoint they were found for: every layer, at its own sizes.

transformers' class is built without memory for its weights. One layer at a time is loaded as
`from_pretrained` loads it, runs on what the layer before gave, is compared with what weightscope
reads, and is given back.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import sqrt
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from weightscope.adopting.comparison import (
    REFUSED,
    TOLERANCE,
    compare,
    compared_scores,
    matched,
    stack_of,
)
from weightscope.adopting.config_keys import SPECIAL, unnamed
from weightscope.adopting.hooks import Observed, parts_left, watch_layers
from weightscope.adopting.inputs import Inputs
from weightscope.adopting.tiny_models import SIZES, attention_of, class_and_line
from weightscope.adopting.trial import Tiny
from weightscope.checkpoint.checkpoint import Checkpoint, DerivedTensor, WholeTensor
from weightscope.core.errors import CheckpointError
from weightscope.core.progress import bar
from weightscope.model.layers.layer import Layer
from weightscope.model.model import Model
from weightscope.model.rows.family import Family

TOKENS = 1152  # tokens of a run
MOST_SCORES = 1 << 26  # scores of one layer; some 26 arrays of them at once take 7 GB
MOST_BEYOND = 1 << 24  # scores of a text beyond the window where such positions were run: 1.7 GB
PAIR = 67  # tokens of each of two sequences in one batch
MOST_WORK = 3e14  # multiplications: an hour or two on two cores
PASSES = 7  # runs of each layer
# Largest scores that weights are multiplied for, so that bounds of scores, queries, keys and values
# are met. 0: as they are.
NEAR = (0.0, 30.0, 300.0)
FAR = (8.0,)  # far positions, where float32's angles are less exact
# Float32's errors of a score, relative to the largest.
OF_SUM = 2.0**-17
OF_ANGLE = 2.0**-25  # for each position
ENDS = 10  # positions of a model that special tokens may take
LIMITS = re.compile(r"positions?(_|$)|n_ctx|seq_len|sequence_length|context_length", re.ASCII)
NO_WINDOW = re.compile(r"original|relative|bucket", re.ASCII)  # words of limits that are no window
LONGEST = 1 << 20  # most positions that a number under an unclear key may mean
EDGE = 60  # ids at either end of a vocabulary: special tokens', as a rule
# Words in keys of ids that no text has.
UNWRITTEN = re.compile(r"image|video|audio|vision|speech|boi|eoi|boa|eoa", re.ASCII)
FIXED = ("pixel_values", "input_features")  # inputs whose length the config sets


@dataclass
class Outcome:
    """The outcome of one row on the checkpoint itself."""

    problem: str = ""
    unproved: str = ""  # the reason that it was not compared as far as a proof needs
    beyond: tuple[str, ...] = ()  # limits up to which it is proved


@dataclass
class _Reach:
    """The extent of one stack's runs."""

    layers: set[int] = field(default_factory=set)
    in_pairs: set[int] = field(default_factory=set)  # layers that ran on two sequences at once
    scored: set[int] = field(default_factory=set)  # layers in which a query saw two keys
    special: bool = True  # special tokens were among those that they ran on
    placed: bool = False  # the positions that it was given matter
    tokens: int = 0
    position: int = -1
    fixed: bool = False  # the config sets its length
    small: bool = False  # it was not compared with larger scores


@dataclass(frozen=True)
class _Multiplied(DerivedTensor, WholeTensor):
    """A tensor times a number."""

    factor: float

    def read(self) -> np.ndarray:
        return np.asarray(self.stored.read() * np.float32(self.factor))


def at_full_size(
    rows: Mapping[str, Family], config: Any, checkpoint: Checkpoint, tiny: Tiny
) -> Mapping[str, Outcome]:
    """The outcome of each stack's row on the checkpoint that it was found for.

    `config` is the checkpoint's, as transformers has it; `tiny` has the same class, and its layers
    tell the large model's.
    """
    try:
        trial = _Trial(rows, config, checkpoint, tiny)
        trial.run()
    except Exception as error:  # whatever transformers raises of sizes, names or weights
        problem = f"transformers does not run it: {class_and_line(error)}"
        return {stack: Outcome(unproved=problem) for stack in rows}
    return {stack: trial.outcome(stack) for stack in rows}


@contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters made within take no memory and are not initialised; buffers stay as made."""
    from transformers.initialization import no_init_weights, no_tie_weights

    register = torch.nn.Module.register_parameter

    def empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = _nothing(parameter)

    with (
        no_init_weights(),
        no_tie_weights(),
        patch.object(torch.nn.Module, "register_parameter", empty),
    ):
        yield


def _nothing(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of the same shape without memory."""
    return torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


class _Weights:
    """A model's parameters, loaded from a checkpoint as transformers loads them, and given back."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.model, self.conversions = model, get_model_conversion_mapping(model)
        conversions = self.conversions
        renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
        known, prefix = model.state_dict(), model.base_model_prefix
        self.stored: dict[str, str] = {}  # the (first) parameter of each tensor in the file
        for name in checkpoint:
            renamed = loading.rename_source_key(name, renamings, converters, prefix, known)[0]
            if renamed not in known and name in known:
                renamed = name
            self.stored[name] = renamed

    def under(self, module: str) -> set[str]:
        """The names in the file of a module's parameters."""
        return {name for name, made in self.stored.items() if made.startswith(module + ".")}

    def load(self, names: set[str], checkpoint: Checkpoint) -> None:
        """Load these tensors."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        checkpoint.prefetch(names)
        tensors = {
            name: torch.from_numpy(np.require(checkpoint[name].read(), requirements="W"))
            for name in names
        }
        how = LoadStateDictConfig(
            device_map={"": "cpu"}, dtype=torch.float32, weight_mapping=self.conversions
        )
        convert_and_load_state_dict_in_model(self.model, tensors, how)

    def fill(self, names: Iterable[str]) -> None:
        """Make random what the file lacks of these parameters; nothing compared depends on it."""
        for name in names:
            if (missing := self.model.get_parameter(name)).is_meta:
                module, _, last = name.rpartition(".")
                random = torch.nn.Parameter(0.02 * torch.randn(missing.shape), requires_grad=False)
                self.model.get_submodule(module)._parameters[last] = random

    def give_back(self, module: str) -> None:
        """Free the memory of a module's parameters."""
        for part in self.model.get_submodule(module).modules():
            for name, parameter in part.named_parameters(recurse=False):
                part._parameters[name] = _nothing(parameter)


class _Texts(Inputs):
    """Inputs as long as a run, at given positions if any; with `pairs`, two in one batch."""

    def __init__(
        self,
        module: Any,
        tokens: int,
        at: torch.Tensor | None,
        special: Sequence[int] = (),
        vocabulary: int = 0,
        *,
        pairs: bool = False,
    ) -> None:
        size = replace(SIZES[0], length=tokens, grid=16)
        size = replace(size, vocabulary=vocabulary or size.vocabulary)
        super().__init__(module, size, seed=0, start=0 if at is None else 1)
        self.at, self.pairs, self.special = at, pairs, special
        self.samples = 320 * tokens + 80  # as many tokens as a run has

    def ids(self, length: int) -> torch.Tensor:
        """Random ids with special ones among them, the first of these first, twice if possible."""
        ids, last = super().ids(length), self.vocabulary
        named = [token for token in self.special if token < last]
        edges = *range(min(EDGE, last)), *range(max(0, last - EDGE), last)
        special = list(dict.fromkeys((*named, *edges)))
        if self.special and length > 1:
            chosen = (special * 2)[: length // 2]
            places = 1 + torch.randperm(length - 1, generator=self.generator)[: len(chosen) - 1]
            ids[0, torch.cat((torch.zeros(1, dtype=torch.long), places))] = torch.tensor(chosen)
        return ids

    @property
    def positions(self) -> torch.Tensor:
        return super().positions if self.at is None else self.at[None]

    def attempts(self) -> Iterator[dict[str, Any]]:
        """The inputs to try; those with the positions only, if there are any."""
        for given in super().attempts():
            if self.pairs:
                if any("grid" in name for name in given):  # images of one batch are one sequence
                    continue
                twice = {name: _twice(value) for name, value in given.items()}
                # the second ends before the first
                if "input_ids" in twice and "attention_mask" in self.parameters:
                    seen = torch.ones(twice["input_ids"].shape[:2], dtype=torch.long)
                    seen[1, -(seen.shape[1] // 4) :] = 0
                    yield twice | {"attention_mask": seen}
                yield twice
            elif self.at is None:
                yield given
            elif "position_ids" in given:
                if "attention_mask" in self.parameters:  # without, a gap begins another text
                    given["attention_mask"] = torch.ones(1, len(self.at), dtype=torch.long)
                yield given


def _twice(value: Any) -> Any:
    """An input as two of the same in one batch, where it is of one."""
    single = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == 1
    return value.repeat(2, *(1 for _ in value.shape[1:])) if single else value


class _Trial:
    """The rows of a checkpoint, and its layers one after the other."""

    def __init__(
        self, rows: Mapping[str, Family], config: Any, checkpoint: Checkpoint, tiny: Tiny
    ) -> None:
        self.checkpoint, self.rows = checkpoint, rows
        self.models = {stack: Model.of_row(checkpoint, row) for stack, row in rows.items()}
        self.problems = dict.fromkeys(rows, "")
        self.reached = {stack: _Reach() for stack in rows}
        self.ends = False  # it does not run on texts or positions beyond those that it has
        self.near: dict[tuple[str, int], int] = {}  # hashes of scores at positions from 0 on
        values = config.to_dict() | {"use_cache": False}
        values.pop("quantization_config", None)
        config = type(config).from_dict(values)
        how = attention_of(config.model_type)
        with _without_memory():
            make = type(tiny.model)._from_config
            self.model = make(config, attn_implementation=how, dtype=torch.float32).eval()
        size = sum(parameter.numel() for parameter in self.model.parameters())
        self.work = 2.0 * size * TOKENS * PASSES
        self.weights = _Weights(self.model, checkpoint)
        self.parameters = [name for name, _ in self.model.named_parameters()]
        self.layers = self._layers(tiny)
        self.modules = {stack: self._modules(stack) for stack in rows}
        values = self.model.config.to_dict()
        integers = [(key, value) for key, value in _items(values) if type(value) is int]
        self.limits = {
            value for key, value in integers if LIMITS.search(key) and not NO_WINDOW.search(key)
        }
        self.special = _special(values)
        widths: set[int] = set()
        for name, tensor in checkpoint.items():
            if not re.search("pos|wpe", name):
                widths.update(tensor.shape)
        # A number under an unclear key may be a length of texts.
        lengths = {value for key, value in integers if unnamed({key: value})} - widths
        self.lengths = {length for length in lengths if TOKENS < length <= LONGEST}
        names = (model.prefix + model.family.inputs.tokens for model in self.models.values())
        tables = (checkpoint[name] for name in names if name in checkpoint)
        self.vocabulary = max((table.shape[0] for table in tables), default=0)

    def _layers(self, tiny: Tiny) -> list[str]:
        """The modules that are layers: named as the tiny model's are, and within no other one."""
        kinds = {stack_of(call.layer) for calls in tiny.stacks.values() for call in calls}
        names = [name for name, _ in self.model.named_modules() if name and stack_of(name) in kinds]
        return [name for name in names if not any(name.startswith(outer + ".") for outer in names)]

    def _modules(self, stack: str) -> dict[str, list[int]]:
        """The layers of a stack's model that each of its modules of attention is."""
        stored = {
            name: self.weights.under(name)
            for name, _ in self.model.named_modules()
            if stack_of(name) == stack
        }
        by_module = matched([self.models[stack]], stored)
        return {name: [index for _, index in by_module.get(name, ())] for name in stored}

    def outcome(self, stack: str) -> Outcome:
        """The outcome of a stack's row."""
        if self.problems[stack]:
            return Outcome(self.problems[stack])
        model, reach = self.models[stack], self.reached[stack]
        if self.work > MOST_WORK:
            problem = f"running it takes {self.work:.1g} multiplications"
            return Outcome(unproved=f"{problem}; {MOST_WORK:.0g} at most are")
        if left := [*{*model.attention_layers, *model.borrowing_layers} - reach.layers]:
            return Outcome(unproved=f"layer {min(left)} and {len(left) - 1} more did not run")
        if reach.layers - reach.scored:
            return Outcome(unproved="every query saw one key only, so that no score was compared")
        if reach.small:
            problem = "it was not compared with larger scores"
            return Outcome(unproved=f"{problem}: weightscope does not see what enters it")
        limits = [limit for limit in (*self.limits, *self.lengths) if limit > reach.position]
        window, end = self._window(model), model.config.n_positions or min(limits, default=TOKENS)
        alone = () if reach.in_pairs >= reach.layers else ("one sequence at a time",)
        if reach.fixed:
            return Outcome(beyond=alone)
        if not reach.special:
            problem = f"it did not run on token ids below {EDGE} and other special tokens"
            return Outcome(unproved=problem)
        texts = () if reach.tokens > window > 0 else (f"texts of {reach.tokens:,} tokens",)
        if self.ends and reach.position >= end - ENDS:
            return Outcome(beyond=alone if reach.tokens >= end - ENDS else (*texts, *alone))
        if reach.tokens <= 1000:
            return Outcome(unproved=f"it ran on {reach.tokens} tokens only")
        if reach.position < window:
            problem = f"it ran to position {reach.position} only, and was trained to {window}"
            return Outcome(unproved=problem)
        far = () if window or reach.position < reach.tokens else (f"position {reach.position:,}",)
        return Outcome(beyond=(*far, *texts, *alone))

    def _window(self, model: Model) -> int:
        """The trained window by the config; 0 where no key of it is known as one."""
        return model.config.n_positions or max(self.limits, default=0)

    def run(self) -> None:
        """Run near and far, until no row is left that is right."""
        if self.work > MOST_WORK or not self.layers:
            return
        self._load_what_is_in_no_layer()
        window = max(map(self._window, self.models.values()))
        heads = max(model.config.n_heads for model in self.models.values())
        tokens = 0
        shorter = {limit - special for limit in self.limits for special in (0, 2, 4, ENDS)}
        for length in (TOKENS, *sorted(shorter, reverse=True)):
            if 1 < length <= TOKENS and self._left():
                self.ends = length < TOKENS
                tokens = (length if self._run(length, None, NEAR) else 0) or tokens
        if not tokens:
            return
        self._run(min(tokens, PAIR), None, NEAR[:1], pairs=True)
        if any(True for _ in _Texts(self.model, 2, torch.arange(2)).attempts()):
            usual = max(2 * window, 4 * TOKENS)
            further = {2 * length for length in self.lengths if 2 * length > usual}
            reaches = sorted({usual, *further}, reverse=True)
            if not any(self._run(tokens, _spread(tokens, furthest), FAR) for furthest in reaches):
                self.ends = True
                if window > tokens:
                    self._run(tokens, _spread(tokens, window - 1), FAR)
        placed = any(reach.placed for reach in self.reached.values())
        most_scores = MOST_BEYOND if placed else MOST_SCORES
        if window >= TOKENS and heads * (window + 64) ** 2 <= most_scores:
            self._run(window + 64, None, FAR)

    def _left(self) -> bool:
        """True if a row is right so far and one of its layers did not run."""
        for stack, modules in self.modules.items():
            layers = chain.from_iterable(modules.values())
            if not self.problems[stack] and not self.reached[stack].layers.issuperset(layers):
                return True
        return False

    def _load_what_is_in_no_layer(self) -> None:
        """Load all that is outside layers; what the file lacks is random."""
        within, known = tuple(f"{name}." for name in self.layers), self.model.state_dict()
        outside = {
            name
            for name, made in self.weights.stored.items()
            if made in known and not made.startswith(within)
        }
        self.weights.load(outside, self.checkpoint)
        self.model.tie_weights(recompute_mapping=False)
        self.weights.fill(name for name in self.parameters if not name.startswith(within))

    def _run(
        self, tokens: int, at: torch.Tensor | None, sizes: tuple[float, ...], pairs: bool = False
    ) -> bool:
        """Run the model, or parts that it does not run itself; True if any layer ran."""
        ran: set[str] = set()
        for _, part in parts_left(self.model, ran):
            if all(self.problems.values()):
                break
            for special in (self.special, ()):
                texts = _Texts(part, tokens, at, special, self.vocabulary, pairs=pairs)
                if self._any_ran(texts, part, sizes, ran):
                    break
        return bool(ran)

    def _any_ran(self, texts: _Texts, part: Any, sizes: tuple[float, ...], ran: set[str]) -> bool:
        """Run a part on the first of these inputs that it takes; True if any layer ran."""
        for given in texts.attempts():
            count = len(ran)
            try:
                self._stream(part, given, sizes, ran, texts)
            except CheckpointError:
                raise
            except Exception:  # whatever it raises of inputs that are not its own
                continue
            finally:
                for layer in self.layers:
                    self.weights.give_back(layer)
            if len(ran) > count:
                return True
        return False

    def _stream(
        self,
        part: Any,
        given: dict[str, Any],
        sizes: tuple[float, ...],
        ran: set[str],
        inputs: _Texts,
    ) -> None:
        """Run one part of the model; each layer is loaded when entered and freed when left."""
        calls_before, streams = Counter[str](), {}
        texts = {ids.shape[1] for name, ids in given.items() if name.endswith("input_ids")}
        attention = tuple(f"{module}." for modules in self.modules.values() for module in modules)
        total = len(self.layers)
        progress = bar(what="layers of the checkpoint itself", unit=" compared", total=total)

        def enter(layer: str) -> None:
            self.weights.load(self.weights.under(layer), self.checkpoint)
            names = [name for name in self.parameters if name.startswith(layer + ".")]
            self.weights.fill(name for name in names if not name.startswith(attention))
            for name in names:
                if self.model.get_parameter(name).is_meta:
                    raise CheckpointError(f"lacks '{name}'", file=self.checkpoint.name)

        def leave(layer: str, calls: list[Observed], again: Callable[[], list[Observed]]) -> None:
            for stack, index, which in self._layers_of(calls, calls_before):
                reach, call = self.reached[stack], calls[which]
                streams[stack, index, call.sequence] = call.streams
                if inputs.pairs:
                    reach.in_pairs.add(index)
                else:
                    self._note(stack, index, call, inputs)
                    has_fixed = any(name in given for name in FIXED)
                    if has_fixed and call.attention.shape[1] not in texts:
                        reach.fixed = True
                    reach.special = reach.special and (bool(inputs.special) or not texts)
                for size in sizes:
                    if not self.problems[stack]:
                        self.problems[stack] = self._compared(
                            stack, index, which, call, size, layer, again, streams
                        )
            calls_before.update(call.module for call in calls if not call.sequence)
            self.weights.give_back(layer)
            ran.add(layer)
            progress.update(1)

        with progress:
            layers, sequences = self.layers, 1 + inputs.pairs
            watch_layers(part, self.model, given, layers, enter, leave, sequences)

    def _note(self, stack: str, index: int, call: Observed, inputs: _Texts) -> None:
        """Note how far a call reached; scores that ignore positions show no reach."""
        reach, tokens = self.reached[stack], call.attention.shape[1]
        seen = hash(call.scores.tobytes())
        if inputs.at is None:
            self.near.setdefault((stack, index), seen)
        moved = inputs.at is not None and self.near.get((stack, index)) != seen
        reach.layers.add(index)
        if compared_scores(call):
            reach.scored.add(index)
        reach.placed = reach.placed or moved
        reach.tokens = max(reach.tokens, tokens)
        reach.position = max(reach.position, _furthest(call) if moved else tokens - 1)

    def _layers_of(
        self, calls: list[Observed], before: Counter[str]
    ) -> Iterator[tuple[str, int, int]]:
        """Stack and layer index of each call, and its number among the calls."""
        counts = before.copy()
        for which, call in enumerate(calls):
            counts[call.module] += not call.sequence
            stack = stack_of(call.module)
            if indices := self.modules.get(stack, {}).get(call.module):
                yield stack, indices[min(counts[call.module], len(indices)) - 1], which

    def _compared(
        self,
        stack: str,
        index: int,
        which: int,
        call: Observed,
        size: float,
        path: str,
        again: Callable[[], list[Observed]],
        streams: Mapping[tuple[str, int, int], tuple[np.ndarray, ...]],
    ) -> str:
        """The problem of one layer with its largest score at `size` or more; empty if none."""
        model = self.models[stack]
        layer, top = model.layer(index), _top(call)
        if layer.keys_of is not None:
            call = replace(call, memories=streams[stack, layer.keys_of, call.sequence])
        how = ""
        if size > top > 0:
            factors = _factors(model, index, layer, call, size / top)
            if not factors:
                self.reached[stack].small = True
                return ""
            stored = self.checkpoint
            larger = {name: _Multiplied(stored[name], by) for name, by in factors.items()}
            changed = stored.with_tensors(larger)
            self.weights.load(self.weights.under(path), changed)
            calls = again()
            memories, call = call.memories, calls[which]
            call = replace(call, memories=memories) if layer.keys_of is not None else call
            layer, top = Model.of_row(changed, self.rows[stack]).layer(index), max(size, _top(call))
            how = f" with scores as large as {size:.0f}"
        elif size in NEAR[1:]:
            return ""  # its own are as large
        tolerance = max(TOLERANCE, min(0.05, top * max(OF_SUM, _furthest(call) * OF_ANGLE)))
        problem = compare(layer, call, tolerance).removeprefix(REFUSED)
        return f"at its own size: layer {index}{how}: {problem}" if problem else ""


def _items(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key of a config and its parts, with its value."""
    for key, value in values.items():
        yield str(key), value
        yield from _items(value) if isinstance(value, Mapping) else ()


def _special(values: Mapping[str, Any]) -> list[int]:
    """The ids of special tokens in texts, by a config and its parts; the one that begins them
    first.

    A config that names none leaves 1, which begins texts as a rule.
    """
    items = [(key, value) for key, value in _items(values) if SPECIAL.fullmatch(key)]
    named = [(key, value) for key, value in items if not UNWRITTEN.search(key)]
    named.sort(key=lambda item: not item[0].startswith("bos"))
    ids = chain.from_iterable(value if isinstance(value, list) else [value] for _, value in named)
    return list(dict.fromkeys(token for token in ids if type(token) is int and token >= 0)) or [1]


def _spread(tokens: int, furthest: int) -> torch.Tensor:
    """Positions of this many tokens: half from 0 on, the others spread up to the furthest."""
    near = torch.arange(tokens - tokens // 2)
    far = torch.linspace(float(len(near)), furthest, tokens // 2, dtype=torch.float64)
    return torch.cat((near, far.round().long()))


def _furthest(call: Observed) -> int:
    """The largest position of a query."""
    return call.attention.shape[1] - 1 if call.positions is None else int(call.positions.max())


def _top(call: Observed) -> float:
    """The largest score of a token with itself, which no distance changes; any score if crossed."""
    scores = call.scores
    if scores.shape[1] == scores.shape[2]:
        scores = np.diagonal(scores, axis1=1, axis2=2)
    seen = np.abs(scores[np.isfinite(scores) & (np.abs(scores) < 1e4)])
    return float(seen.max(initial=0.0))


def _factors(
    model: Model, index: int, layer: Layer, call: Observed, growth: float
) -> dict[str, float]:
    """Factors of tensors that make scores grow so much, and values as large as queries, by name."""
    n, m = call.attention.shape[1:]

    def first_of_shape(*shape: int, among: Iterable[np.ndarray]) -> np.ndarray | None:
        return next((rows for rows in among if rows.shape == shape), None)

    x = memory = first_of_shape(n, layer.d_model, among=(*call.streams, *call.entered))
    if layer.cross:
        memories = *call.memories, *call.entered
        memory = first_of_shape(m, layer.k.shape[1], among=memories)
    if x is None or memory is None:
        return {}
    made = (layer.queries(x), layer.keys(memory), layer.inner_values(memory))
    largest = [float(np.abs(vectors).max()) or 1.0 for vectors in made]
    size = sqrt(growth * largest[0] * largest[1])
    row = model.family.in_layer(model.config.layer_types[index])
    norms = row.scores.qk_norm
    query_norm, key_norm = (norms.query, norms.key) if norms else ("", "")
    modules = (row.heads.q, query_norm), (row.heads.k, key_norm), (row.heads.v,)
    stem = model.stem(index)
    factors: dict[str, float] = {}
    for names, now in zip(modules, largest, strict=True):
        for module in filter(None, names):
            for name in model.checkpoint.names_under(stem + module):
                if name[len(stem + module)] in "._":
                    factors[name] = max(factors.get(name, 1.0), size / now)
    return factors
