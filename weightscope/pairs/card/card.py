"""Check a checkpoint before it is published, and say of each item what proves it."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from huggingface_hub import ModelCard

from weightscope.checkpoint.config import MAX_BYTES, read_small
from weightscope.checkpoint.provenance import Provenance, read_digests
from weightscope.core.errors import CheckpointError, counted, one_line, printable
from weightscope.core.progress import progress_shown
from weightscope.core.results import Result
from weightscope.core.tables import Table, as_json, column
from weightscope.heads.audit.audit import Audit, audit
from weightscope.heads.tensors.config_readers import (
    disagreement_line,
    taken_by_readers,
)
from weightscope.heads.tensors.measure import TensorFacts
from weightscope.heads.tensors.tied_head import says_tied, stored_ends, tie_holds
from weightscope.heads.tensors.untrained_parts import (
    JUDGED_ROWS,
    LEAST_WIDE,
    matrix_of,
    may_be_random,
)
from weightscope.model.config.readers import disagreements
from weightscope.model.model import Model, open_model
from weightscope.pairs.card.config_fit import config_fit
from weightscope.pairs.claims.claim import tier_of
from weightscope.pairs.identity.identity import Identity, identity
from weightscope.pairs.lineage.lineage import lineage
from weightscope.pairs.same import DIFFERENT, UNDECIDED
from weightscope.pairs.same.same import same
from weightscope.report.findings import listed

BEGIN, END = "<!-- weightscope card -->", "<!-- end of weightscope card -->"
README = "README.md"
METADATA, METADATA_CHARACTERS = "---", 1_000_000  # 10 seconds of a YAML parser; published: 300,000
ANCHOR = re.compile(r"(^|[\s\[{,:])&\w", re.MULTILINE)
NAMED = 3  # tensors in a sentence
MAXIMA = {"F16": 65504.0, "BF16": 3.39e38, "F32": 3.4e38, "F64": 1.79e308}  # by dtype
RUN_AS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
WITH_HEAD = ("ForCausalLM']", "LMHeadModel']")
MARKUP = re.compile(r"[\\`*\[\]|!#~]|(?<!\w)_|_(?!\w)")
BAR = "\\|"
QUERIES = re.compile(r"(^|[+.])q($|[+.])")
BROKEN = (
    *("not_finite", "overflow", "zero_tensor", "zero_head", "out_of_scale", "duplicate_layers"),
    *("duplicate_tensors", "duplicate_heads", "copied_experts", "dead_experts"),
)
AGAINST_TRAINING = (
    *("untrained", "untrained_layer", "noise_floor", "swapped_factors", "mixed_factors"),
    "transposed_factors",
)
AGAINST_CONFIG = ("norm_offset", "overwritten_head", "other_weights")

OF_AUDIT = "weightscope audit {name} --all"
COMMANDS = {  # by item; what repeats it
    "original": "weightscope same {original} {name}",
    "values": OF_AUDIT,
    "randomness": "weightscope card {name}",
    "config": "weightscope card {name}",
    "readers": "weightscope inspect {name} --readers",
    "logits": OF_AUDIT,
    "lineage": "weightscope lineage {name} {base}",
    "identity": "weightscope id {name} --digest",
}


class State(Enum):
    """Knowledge of an item."""

    VERIFIED = "verified"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


class Item(NamedTuple):
    """A row of the card."""

    item: str = column("What was looked at.")
    state: str = column()
    what: str = column("The evidence, in a sentence.")
    command: str = column("What repeats it.")


Answer = tuple[State, str]


@dataclass(frozen=True, eq=False, repr=False)
class Card(Result):
    """The items of a checkpoint's card, and its identity."""

    name: str
    items: Sequence[Item]
    identity: Identity | None  # None where a tensor has no label
    provenance: Provenance

    @property
    def about(self) -> str:
        """The name and the numbers of items."""
        return f"{self.name}: {self._counts}"

    @property
    def wsid(self) -> str:
        """The identity in one line; empty where it has none."""
        return self.identity.wsid if self.identity else ""

    @property
    def _counts(self) -> str:
        states = [each.state for each in self.items]
        return ", ".join(
            f"{states.count(state.value)} {state.value}" for state in State if state.value in states
        )

    @property
    def lead(self) -> str:
        """The numbers of items, and those that failed."""
        failed = [each.item for each in self.items if each.state == State.FAILED.value]
        rest = f": {', '.join(failed)} failed" if failed else ""
        return f"{printable(self.name)}: {self._counts}{rest}."

    @property
    def failed(self) -> bool:
        """True if an item failed."""
        return any(each.state == State.FAILED.value for each in self.items)

    @property
    def table(self) -> Table:
        """One row for each item."""
        return Table.of(Item, self.items)

    def printed(self) -> list[str | Table]:
        """The lines that the terminal shows."""
        return [self.lead, self.table.select("item", "state", "what")]

    def as_json(self) -> dict[str, Any]:
        """The items, as `weightscope card --json` prints them."""
        items = [each._asdict() for each in self.items]
        about = {"name": self.name, "wsid": self.wsid, "items": items}
        return dict(as_json(self.provenance.envelope(self.lead) | about))

    @property
    def section(self) -> str:
        """The section of a model card, between two markers: Markdown, and YAML for programs."""
        rows = [[_cell(text) for text in each[:3]] + [_code(each[3])] for each in self.items]
        table = [("item", "state", "evidence", "repeat with"), ("---",) * 4, *rows]
        states = [f"    {each.item}: {each.state}" for each in self.items]
        about = {"wsid": self.wsid, "version": self.provenance.version}
        files = [file for origin in self.provenance.sources for file in origin["files"]]
        hashes = {file["name"]: file["sha256"] for file in files if "sha256" in file}
        return "\n".join(
            [
                BEGIN,
                "## Checks",
                "",
                _cell(self.lead),
                "",
                *(f"| {' | '.join(row)} |" for row in table),
                "",
                "```yaml",
                "weightscope:",
                *(f"  {key}: {_yaml(value)}" for key, value in about.items()),
                "  items:",
                *states,
                "  sha256:",
                *(f"    {_yaml(name)}: {digest}" for name, digest in hashes.items()),
                "```",
                END,
            ]
        )


def _cell(text: str) -> str:
    """Text in a cell of a table of Markdown, whatever characters names have."""
    return MARKUP.sub(r"\\\g<0>", printable(text)).replace("<", "&lt;")


def _code(text: str) -> str:
    """Text as code in a cell of a table of Markdown."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{printable(text).replace('|', BAR)}{pad}{ticks}"


def _yaml(value: object) -> str:
    """A value in YAML, without a marker's first character."""
    return json.dumps(value).replace("<", "\\u003c")


def card(
    source: Model | str | Path,
    base: str | Path | None = None,
    original: str | Path | None = None,
    *,
    progress: bool | None = None,
) -> Card:
    """Check a checkpoint item by item: each is verified, failed or not checked.

    Parameters
    ----------
    source : Model, str or Path
        A model, or what `open_model` opens.
    base : str or Path, optional
        The model that it was made from.
    original : str or Path, optional
        The model that it is a copy of, or that model's identity (a file in .id.json).
    progress : bool, optional
        Show bars; by default in a notebook only.

    Raises
    ------
    CheckpointError
        The checkpoint cannot be read.

    Examples
    --------
    >>> import weightscope as ws
    >>> ws.card("embedded").failed
    False
    """
    model = source if isinstance(source, Model) else open_model(source)
    name = _name(model.checkpoint.given or str(source))
    with progress_shown(progress), np.errstate(all="ignore"):
        read_digests(model.checkpoint)
        audited = audit(model, all_tensors=True, directions=0, sinks=False)
        identified = _identified(model)
        of_values = identified if isinstance(identified, Identity) else None
        asked: dict[str, Callable[[], Answer]] = {
            "original": partial(_copy, model, original),
            "values": partial(_values, audited),
            "randomness": partial(_randomness, model, audited),
            "config": partial(_config, model, audited),
            "readers": partial(_readers, model),
            "logits": partial(_logits, model, audited),
            "lineage": partial(_base, model, base, of_values),
            "identity": partial(_identity, identified),
        }
        names = {
            "name": name,
            "original": _name(original) if original else "...",
            "base": _name(base) if base else "...",
        }
        items = [_item(each, COMMANDS[each].format(**names), ask) for each, ask in asked.items()]
    return Card(model.name, items, of_values, Provenance.of(model.checkpoint))


def _identified(model: Model) -> Identity | CheckpointError:
    """The identity, or why it has none."""
    try:
        return identity(model)
    except CheckpointError as error:
        return error


def _name(source: str | Path) -> str:
    """A Hub id, or the last part of a path: a card is read on other machines."""
    return quote(Path(source).name if Path(source).exists() else str(source))


def _item(name: str, command: str, ask: Callable[[], Answer]) -> Item:
    """An item; what cannot be read is not checked."""
    try:
        state, what = ask()
    except CheckpointError as error:
        state, what = State.NOT_CHECKED, one_line(error)
    return Item(name, state.value, what, command)


def _copy(model: Model, original: str | Path | None) -> Answer:
    if original is None:
        return State.NOT_CHECKED, "no original was given"
    result = same(original, model)
    states = {DIFFERENT: State.FAILED, UNDECIDED: State.NOT_CHECKED}
    state, what = states.get(result.verdict, State.VERIFIED), result.lead
    if result.tokens.verdict == DIFFERENT:
        state, what = State.FAILED, f"{what} {result.tokens.lead}"
    if files := result.companions.named:
        what = f"{what} Besides, {listed([*map(str, files)], NAMED)}."
    return state, what


def _failure(audited: Audit, kinds: Sequence[str], meant: Collection[str] = ()) -> Answer | None:
    """A failure with the findings of these kinds that are more than a note; None without any.

    Those about tensors that may be `meant` so do not count.
    """
    severe = [
        each
        for each in audited.findings
        if each.kind in kinds
        and each.severity != "note"
        and not (each.members and {member.name for member in each.members} <= {*meant})
    ]
    texts = dict.fromkeys(f"{each.title}: {each.where} {each.text}".strip() for each in severe)
    return (State.FAILED, " ".join(texts)) if texts else None


def _values(audited: Audit) -> Answer:
    assert audited.everything is not None
    # a table of token types that adds nothing may be meant, or lost
    types = [each for each in audited.everything.facts if each.known_as == "types"]
    zero = [each.name for each in types if each.least == each.most == 0]
    if failure := _failure(audited, BROKEN, zero):
        return failure
    if unread := audited.everything.unread:
        return State.NOT_CHECKED, f"{counted(len(unread), 'tensor')} cannot be read"
    facts = audited.everything.facts
    flat = [each.name for each in facts if not each.size or _is_flat(each)]
    if lost := [name for name in flat if name not in zero]:
        return State.FAILED, f"empty, or one value throughout: {listed(lost, NAMED)}"
    if zero:
        return State.NOT_CHECKED, f"{listed(zero, NAMED)}: zero, which may be meant"
    what = f"all values of {counted(len(facts), 'tensor')} are finite"
    layers = counted(len({*audited.heads["layer"].tolist()}), "audited layer")
    absent = (
        f"no tensor is empty, no matrix one value; of {layers} none has a zero head or is a copy"
    )
    return State.VERIFIED, f"{what}; {absent}"


def _is_flat(tensor: TensorFacts) -> bool:
    """Detect a matrix of floats that holds one value."""
    is_matrix = len(tensor.shape) > 1 and min(tensor.shape) > 1
    return tensor.kind == "f" and tensor.constant and is_matrix


def _randomness(model: Model, audited: Audit) -> Answer:
    if failure := _failure(audited, AGAINST_TRAINING):
        return failure
    wide = {
        name: tensor.unchecked(set())
        for name, tensor in model.checkpoint.items()
        if min(matrix_of(tensor.shape)) >= LEAST_WIDE
    }
    sides = f"matrices of {LEAST_WIDE} rows and columns or more"
    random = [name for name, tensor in wide.items() if may_be_random(tensor)]
    if random or not wide:
        names = f": {listed(random, NAMED)}" if random else ""
        return State.NOT_CHECKED, f"{len(random)} of {len(wide)} {sides} may be random{names}"
    what = f"none of {len(wide)} {sides} is a draw from one distribution"
    return State.VERIFIED, f"{what}, by its first {JUDGED_ROWS} rows"


def _config(model: Model, audited: Audit) -> Answer:
    if failure := _failure(audited, AGAINST_CONFIG):
        return failure
    if model.unloaded:
        return State.FAILED, model.names_note
    if model.family.inputs.tokens and model.ends.token_name not in model.checkpoint:
        return State.NOT_CHECKED, "the file has no token embedding: it is a part of a model"
    tokens, head = stored_ends(model)
    size = model.config.get("vocab_size")
    if tokens is not None and type(size) is int and size != tokens.shape[0]:
        return State.FAILED, f"config.json has {size:,} tokens, the embedding {tokens.shape[0]:,}"
    tie, classes = tie_holds(model), model.checkpoint.config.get("architectures")
    if tie is None and head is None and str(classes).endswith(WITH_HEAD):
        return State.FAILED, "the file has no head, and config.json does not tie it"
    if tie and not says_tied(model) and not model.ends.tied:
        return State.FAILED, "the head is the token embedding, which config.json does not tie"
    ties = {None: "there is no head", True: "the head is tied", False: "the head is apart"}
    held = config_fit(model)
    if held.doubts:
        return State.NOT_CHECKED, f"{held.doubts}; attention fits {model.family.name}"
    return State.VERIFIED, f"attention fits {model.family.name}; {held.fits}; {ties[tie]}"


def _readers(model: Model) -> Answer:
    readings = taken_by_readers(model)
    if taken_otherwise := disagreements(readings, model.checkpoint.config):
        return State.FAILED, disagreement_line(taken_otherwise)
    readers = dict.fromkeys(each.reader for each in readings if each.values)
    without = ", ".join({each.reader: None for each in readings if each.reader not in readers})
    places = ", ".join(dict.fromkeys(str(place) for each in readings for place in each.values))
    aside = f"; not read by {without}" if without else ""
    state = State.VERIFIED if len(readers) > 1 else State.NOT_CHECKED
    return state, f"{', '.join(readers) or 'no reader'} take the same {places}{aside}"


def _logits(model: Model, audited: Audit) -> Answer:
    """The largest bound is a proof where it is in range; beyond it nothing is known."""
    bounds = audited.heads["qk_logit_bound"]
    if stacks := _other_attention(model):
        return State.NOT_CHECKED, f"attention was not looked at in {listed(stacks, NAMED)}"
    dtypes = {tensor.dtype for tensor in model.checkpoint.values()}
    runs_in = model.checkpoint.config.get("dtype", model.checkpoint.config.get("torch_dtype"))
    dtypes.add(RUN_AS.get(runs_in, "") if isinstance(runs_in, str) else "")
    dtype = min((each for each in dtypes if each in MAXIMA), key=MAXIMA.__getitem__, default="F16")
    if not np.isfinite(bounds).all():
        return State.NOT_CHECKED, "the logits of some heads have no bound"
    largest = float(bounds.max(initial=0.0))
    what = f"no attention logit is above {largest:.3g}; the largest {dtype} is {MAXIMA[dtype]:.3g}"
    return State.VERIFIED if largest <= MAXIMA[dtype] else State.NOT_CHECKED, what


def _other_attention(model: Model) -> list[str]:
    """Stacks with queries that are not the one that was audited, and cross-attention."""
    tensors = model.unchecked().tensors
    queries = [each for each in tensors if QUERIES.search(each.role) and each.layer is not None]
    stacks = {each.stack or "other tensors" for each in queries if each.stack != tensors.own}
    crossed = {each.name for each in queries if each.stack == tensors.own and "cross" in each.role}
    return [*sorted(stacks), *(["cross-attention"] if crossed else [])]


def _base(model: Model, base: str | Path | None, mine: Identity | None) -> Answer:
    named = _bases_in_card(model)
    if base is None:
        aside = f"; {README} names {printable(', '.join(named))}" if named else ""
        return State.NOT_CHECKED, f"no base was given{aside}"
    # the same probes in each run, as its values are
    nonce = mine.wsid.rpartition(":")[2][:32] if mine else None
    result = lineage(model, [base], nonce=nonce)
    if result.verdict == UNDECIDED:
        return State.NOT_CHECKED, result.lead
    is_one = not named or _short(str(base)) in map(_short, named)
    aside = "" if is_one else f" {README} names {printable(', '.join(named))} as its base."
    what = f"{result.lead} The comparison is {tier_of(result)}.{aside}"
    if result.verdict == "unrelated" or result.came_first == "suspect":
        return State.FAILED, what
    if is_one:
        return State.VERIFIED, what
    return State.NOT_CHECKED if Path(base).exists() else State.FAILED, what


def _short(name: str) -> str:
    """The last part of a Hub id or a path, without a revision."""
    path = Path(name)
    path = path.parent if path.is_file() else path
    return path.name.partition("@")[0].casefold()


def _identity(mine: Identity | CheckpointError) -> Answer:
    if not isinstance(mine, Identity):
        raise mine
    hashed = [file for origin in mine.provenance.sources for file in origin["files"]]
    return State.VERIFIED, f"{mine.wsid}; {counted(len(hashed), 'file')} with SHA-256"


def _bases_in_card(model: Model) -> list[str]:
    """The bases that the model card next to the weights names."""
    path = model.checkpoint.folder / README
    if not path.is_file():
        return []
    text = read_small(path, MAX_BYTES).decode(errors="replace")
    if problem := _costly_metadata(text):
        raise CheckpointError(problem, file=path)
    try:
        about = vars(ModelCard(text, ignore_metadata_errors=True).data)
    except Exception:  # YAML has many
        return []
    named = about.get("base_model")
    return [
        each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)
    ]


def _costly_metadata(text: str) -> str:
    """Why a model card's YAML is not parsed; empty if it is short and repeats nothing."""
    if not text.lstrip().startswith(METADATA):
        return ""
    metadata = text.lstrip().removeprefix(METADATA).partition(f"\n{METADATA}")[0]
    if len(metadata) > METADATA_CHARACTERS:
        return f"has more than {METADATA_CHARACTERS} characters of metadata; no more are read"
    if ANCHOR.search(metadata):
        return "has an anchor (&) in its metadata, and a few can fill the memory; write it without"
    return ""


def with_section(text: str, section: str) -> str:
    """A model card with this section in the place of an earlier one, or at its end."""
    spans = _sections(text)
    if not spans:
        return f"{text.rstrip()}\n\n{section}\n".lstrip()
    between = [text[stop:start] for (_, stop), (start, _) in pairwise([*spans, (len(text), 0)])]
    return "".join([text[: spans[0][0]], section, *between])


def section_in(text: str) -> str | None:
    """The section of a model card; None without one that is shown, or with several."""
    spans = _sections(text)
    if len(spans) != 1 or _is_hidden(text[: spans[0][0]]):
        return None
    return text[slice(*spans[0])]


def _is_hidden(before: str) -> bool:
    """Detect a comment or a fence that is open before a section."""
    fences = re.findall(r"^ {0,3}(`{3,}|~{3,})", before, re.MULTILINE)
    return before.rfind("<!--") > before.rfind("-->") or len(fences) % 2 == 1


def without_version(section: str) -> str:
    """A section but for the version that wrote it."""
    return re.sub(r'\n  version: "[\w.+-]*"\n', "\n", section, count=1, flags=re.ASCII)


def _sections(text: str) -> list[tuple[int, int]]:
    """The places [start, stop) of sections; a marker without an end is text."""
    spans: list[tuple[int, int]] = []
    start = text.find(BEGIN)
    while start >= 0 and (end := text.find(END, start)) >= 0:
        spans.append((start, end + len(END)))
        start = text.find(BEGIN, spans[-1][1])
    return spans
