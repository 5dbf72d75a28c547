"""Runs a model on sequences, shows each attention layer as arrays, and edits its output."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import one_blas_thread
from weightscope.core.compute.device import CPU, Device, open_device
from weightscope.core.errors import CheckpointError, counted, first_line
from weightscope.core.progress import bar, phase
from weightscope.core.results import Result, ShowsShapes
from weightscope.model.embeddings import outside
from weightscope.model.layers.layer import Layer
from weightscope.model.model import Model, as_model, overflow
from weightscope.runner.hooks import blocks_of, tower_of, watched
from weightscope.runner.loading import import_torch, load_eager, room_for, torch_device

TOKENS_A_BATCH = 2048
PROOF = 8  # tokens of a text that show if a model can begin above its first layer
LARGEST_ERROR = 1e-4  # relative, of sum_j alpha f(x_j) + b_O against the model's own module


@dataclass(frozen=True, eq=False, repr=False)
class Activations(ShowsShapes):
    """One attention layer at work on a batch of sequences of one length; nothing is padded."""

    layer: Layer  # weightscope's view of it
    inputs: np.ndarray  # (b,) indices of these sequences among all
    tokens: np.ndarray | None  # (b, n); None for images
    x: np.ndarray  # (b, n, d) float32: the residual stream that enters the layer
    # (b, n_heads, n, n) float32: alpha; rows sum to less than 1 where the layer has learned sinks,
    # and to no fixed sum where it has no softmax.
    attention: np.ndarray
    # (b, n, d) float32: attention's output, the sum over heads and j of alpha f(x_j), plus b_O.
    output: np.ndarray

    def each(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """x (n, d) and attention (n_heads, n, n) of one sequence after the other."""
        return zip(self.x, self.attention, strict=True)


# Function of a layer at work; an array that it returns replaces `output` in the model.
Observer = Callable[[Activations], np.ndarray | None]


@dataclass(frozen=True, eq=False, repr=False)
class Batch(ShowsShapes):
    """Sequences of one length, or images of one size."""

    inputs: np.ndarray  # (b,) indices of these sequences among those given
    arrays: np.ndarray  # (b, n)

    @property
    def tokens(self) -> np.ndarray | None:
        return self.arrays if self.arrays.ndim == 2 else None

    def __str__(self) -> str:
        if self.tokens is None:
            return counted(len(self.arrays), "image")
        return f"{counted(len(self.arrays), 'text')} of {counted(self.arrays.shape[1], 'token')}"


def batches(sequences: Sequence[np.ndarray], tokens_a_batch: int = TOKENS_A_BATCH) -> list[Batch]:
    """Sequences of equal shape together, short ones first, so that no batch needs padding."""
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        by_shape[np.shape(sequence)].append(index)
    batches = []
    for shape, indices in sorted(by_shape.items()):
        at_once = 8 if len(shape) == 3 else max(1, tokens_a_batch // max(1, shape[0]))
        for start in range(0, len(indices), at_once):
            chosen = indices[start : start + at_once]
            arrays = np.stack([sequences[index] for index in chosen])
            batches.append(Batch(np.array(chosen), arrays))
    return batches


def open_runner(
    model: Model | str | Path, *, language: bool = False, device: str = "cpu"
) -> "Runner":
    """Load a model for running.

    Parameters
    ----------
    model : Model, str or Path
        A model, or a source that `open_model` opens.
    language : bool
        With the head that predicts the next token, for `Runner.losses`.
    device : str
        Place of the model, and of work on its activations as far as possible; see `open_device`.

    Raises
    ------
    CheckpointError
        PyTorch is not installed, transformers cannot load the checkpoint whole, or the device is
        not there.

    Examples
    --------
    >>> import numpy as np
    >>> import weightscope as ws
    >>> runner = ws.open_runner(ws.open_model("embedded"))
    >>> def show(seen):
    ...     print(seen.layer, seen.attention.shape)
    >>> runner.observe([np.array([11, 12, 13])], show)
    Layer(0: 6 heads of 32, width 192) (1, 6, 3, 3)
    Layer(1: 6 heads of 32, width 192) (1, 6, 3, 3)
    Layer(2: 6 heads of 32, width 192) (1, 6, 3, 3)
    Layer(3: 6 heads of 32, width 192) (1, 6, 3, 3)
    """
    model, opened = as_model(model), open_device(device)
    where = torch_device(opened)
    with phase("loading the model into PyTorch"), room_for("the model", model):
        network = load_eager(model, language=language)
        if not language:
            network = tower_of(network, model)
        return Runner(model, network.to(where), opened)


class Runner:
    """transformers' eager model and weightscope's layers of the same checkpoint.

    Both are kept in float32: a model's parameters once, and its attention's parameters a second
    time. Beyond them a run holds the activations of one layer for one batch. A device has the model
    and the arrays that an observer computes with; the second copy stays on this machine.

    Parameters
    ----------
    model : Model
    network : torch.nn.Module
        The eager model, in evaluation mode.
    device : Device
        Place of the network.
    """

    def __init__(self, model: Model, network: Any, device: Device = CPU) -> None:
        self.model, self.network, self.device = model, network, device
        self.blocks = blocks_of(network, model)
        self.layers = {index: model.layer(index) for index in model.attention_layers}
        self._checked: set[int] = set()

    def observe(
        self,
        sequences: Sequence[np.ndarray],
        observer: Observer,
        layers: Sequence[int] | None = None,
        tokens_a_batch: int = TOKENS_A_BATCH,
    ) -> None:
        """Show an observer every attention layer on every batch; the first batch is checked.

        Parameters
        ----------
        sequences : sequence of (n,) int arrays or of (channels, height, width) float arrays
            Tokens, or pixels as the model takes them.
        observer : callable
            Called with the `Activations` of one layer and batch at a time, layers in order within a
            batch.
        layers : sequence of int, optional
            Only these; the model is not run beyond the last one.
        tokens_a_batch : int

        Raises
        ------
        CheckpointError
            A layer's output differs from the output by its weights: the layer is named. A text is
            empty or has an unknown token; or the model cannot take inputs of this size.
        """
        self._check_texts(sequences)
        wanted = set(self.layers if layers is None else layers)
        with _passes(len(sequences)) as bar:
            for batch in batches(sequences, tokens_a_batch):
                self._forward(batch, observer, wanted, stop=layers is not None)
                bar.update(len(batch.inputs))

    def losses(
        self,
        sequences: Sequence[np.ndarray],
        observer: Observer | None = None,
        layers: Collection[int] | None = None,
        tokens_a_batch: int = TOKENS_A_BATCH,
    ) -> np.ndarray:
        """Sum of the negative log-likelihoods of every token but the first, in nats, a sequence.

        Parameters
        ----------
        sequences : sequence of (n,) int arrays
        observer : callable, optional
            May replace attention outputs on the way.
        layers : collection of int, optional
            Only these are shown to it.
        tokens_a_batch : int

        Returns
        -------
        (len(sequences),) float64 array

        Raises
        ------
        CheckpointError
            As `observe` does.
        """
        self._check_texts(sequences)
        torch = import_torch()
        cross_entropy = torch.nn.functional.cross_entropy
        losses = np.zeros(len(sequences))
        wanted = set(self.layers if layers is None else layers) if observer else set()
        with _passes(len(sequences)) as bar:
            for batch in batches(sequences, tokens_a_batch):
                # (b, n - 1, vocab)
                logits = self._forward(batch, observer, wanted, stop=False).logits[:, :-1]
                following = torch.from_numpy(batch.arrays[:, 1:]).to(logits.device)
                flat = (logits.flatten(0, 1), following.flatten())
                with room_for(f"the losses of {batch}", self.model):
                    each = cross_entropy(*flat, reduction="none")
                losses[batch.inputs] = each.view(following.shape).double().sum(dim=1).cpu().numpy()
                bar.update(len(batch.inputs))
        return losses

    def _check_texts(self, sequences: Sequence[np.ndarray]) -> None:
        """Check that texts have tokens, all in the vocabulary; a GPU fails on others silently."""
        vocab = self.model.config.vocab_size
        for index, each in enumerate(map(np.asarray, sequences)):
            if each.ndim == 3:
                continue
            problem = None
            if each.ndim != 1 or each.dtype.kind not in "iu" or not len(each):
                given = f"{each.dtype} of shape {each.shape}"
                problem = f"{given}; texts are whole numbers of shape (n,)"
            elif (token := outside(each, vocab or None)) is not None:
                problem = f"token {token}; the vocabulary has {vocab}"
            if problem:
                raise CheckpointError(f"text {index} has {problem}", file=self.model.name)

    def _forward(
        self, batch: Batch, observer: Observer | None, layers: Collection[int], *, stop: bool
    ) -> Any:
        """Run the model: its return value, or None if it is stopped after the last of `layers`."""
        torch = import_torch()
        arrays = torch.from_numpy(np.ascontiguousarray(batch.arrays)).to(torch_device(self.device))
        given = {"pixel_values": arrays} if batch.tokens is None else {"input_ids": arrays}
        accepted = inspect.signature(self.network.forward).parameters
        if "use_cache" in accepted:
            given["use_cache"] = False
        if "output_attentions" in accepted:  # DeBERTa's and MPNet's modules ask for it
            given["output_attentions"] = True
        last = max(layers, default=None) if stop else None
        see = observer or (lambda seen: None)
        seen_any = False
        ours: list[Exception] = []  # raised by weightscope or the observer, not by transformers

        def show(index: int, *tensors: Any) -> Any:
            nonlocal seen_any
            seen_any = True
            try:
                new = self._shown(batch, see, index, *tensors)
            except Exception as error:
                ours.append(error)
                raise
            if index == last:
                raise _LastLayerSeen
            return new

        hooks = watched(self.blocks, self.model, layers, show) if observer else nullcontext()
        with torch.inference_mode(), hooks:
            try:
                with room_for(f"{batch} in addition to the model", self.model):
                    returned = self.network(**given)
            except _LastLayerSeen:
                return None
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if error in ours:
                    raise
                given_shape = f"an input of shape {batch.arrays.shape[1:]}"
                problem = f"transformers cannot run it on {given_shape}: {first_line(error)}"
                raise CheckpointError(problem, file=self.model.name) from error
        # SqueezeBERT's encoder calls its layers' forward past their hooks.
        if layers and observer and not seen_any:
            problem = "transformers runs its layers where they cannot be watched"
            raise CheckpointError(problem, file=self.model.name)
        return returned

    def _shown(
        self, batch: Batch, observer: Observer, index: int, x: Any, attention: Any, output: Any
    ) -> Any:
        """Check and show one layer; the tensor that replaces the output, or None."""
        x = x.cpu().numpy()
        output = output.cpu().numpy().reshape(x.shape)
        alpha = attention.cpu().numpy()
        layer = self.layers[index]
        seen = Activations(layer, batch.inputs, batch.tokens, x, alpha, output)
        self.check(seen)
        new = observer(seen)
        return None if new is None else import_torch().from_numpy(np.asarray(new, np.float32))

    def check(self, seen: Activations) -> None:
        """Compare the model's own output with weightscope's, from its folded weights, once a layer.

        Raises
        ------
        CheckpointError
            They differ by more than 1e-4 of the output's norm.
        """
        index = seen.layer.index
        if index in self._checked:
            return
        alpha, x = seen.attention[0].astype(np.float64), seen.x[0].astype(np.float64)
        expected = seen.layer.output(alpha, x)
        size = max(float(np.linalg.norm(expected)), 1e-30)
        error = np.linalg.norm(seen.output[0] - expected) / size
        if not np.isfinite(error):
            raise overflow(self.model, f"attention's output in layer {index}", anywhere=True)
        if not error < LARGEST_ERROR:
            difference = f"differs from what its weights give by {error:.1e} of its size"
            problem = f"layer {index}: attention's output {difference}"
            limit = f"rounding explains no more than {LARGEST_ERROR:g}"
            raise CheckpointError(f"{problem}; {limit}", file=self.model.name)
        if seen.attention.shape[-1] > 1:  # with a single token, alpha is 1 in every head
            self._checked.add(index)


@contextmanager
def _passes(n: int) -> Iterator[Any]:
    """A progress bar, and one BLAS thread for NumPy: more would compete with PyTorch's."""
    with one_blas_thread(), bar(what="forward passes", unit="sequence", total=n) as done:
        yield done


class _LastLayerSeen(Exception):  # noqa: N818  no error: it ends a forward pass early
    """The last layer asked for has been seen."""


# Many changes to one run, each begun where it first differs


class Intervention(NamedTuple):
    """A change to a model as it runs."""

    layers: Collection[int]  # one or more layers
    observer: Observer  # shown these layers; an array that it returns replaces attention's output


def losses_under(
    runner: Runner, texts: Sequence[np.ndarray], interventions: Sequence[Intervention]
) -> np.ndarray:
    """`Runner.losses` of the model as it is and under each intervention: texts (n,).

    Layers below the first changed one are unaffected, so they run once per text. If layers pass
    each other more than their return values, all of them run every time.
    """
    losses = np.zeros((1 + len(interventions), len(texts)))
    firsts = {min(each.layers) for each in interventions}
    begins = dict.fromkeys(firsts, 0)
    for first in firsts:
        if _can_begin_at(runner, first, texts[0][:PROOF]):
            begins[first] = first
    with bar(what="interventions", unit="run", total=losses.size) as done:
        for place, text in enumerate(texts):
            with _kept(runner, firsts) as entering:
                losses[0, place] = runner.losses([text])[0]
            done.update()
            for row, (layers, observer) in enumerate(interventions, 1):
                with _begun_at(runner, begins[min(layers)], entering):
                    losses[row, place] = runner.losses([text], observer, layers)[0]
                done.update()
    return losses


def _can_begin_at(runner: Runner, layer: int, text: np.ndarray) -> bool:
    """True if a run from a layer equals a full run; not if blocks are shared across it."""
    if layer == 0:
        return True  # a full run
    if not set(runner.blocks[:layer]).isdisjoint(runner.blocks[layer:]):
        return False
    with _kept(runner, [layer]) as entering:
        complete = runner.losses([text])
    try:
        with _begun_at(runner, layer, entering):
            return np.allclose(runner.losses([text]), complete, rtol=1e-6)
    except Exception:  # any class: each layer fails in its own way
        return False


@contextmanager
def _kept(runner: Runner, layers: Collection[int]) -> Iterator[dict[int, Any]]:
    """Keep the input of each of these layers within the block: the output of the layer below."""
    entering: dict[int, Any] = {}

    def keep(layer: int) -> Any:
        def hook(block: Any, args: Any, made: Any) -> None:
            entering[layer] = made

        return runner.blocks[layer - 1].register_forward_hook(hook)

    handles = [keep(layer) for layer in layers if layer]
    try:
        yield entering
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _begun_at(runner: Runner, layer: int, entering: dict[int, Any]) -> Iterator[None]:
    """Skip the layers below this one within the block: they return the last one's output."""
    skipped = set(runner.blocks[:layer])
    for block in skipped:
        block.forward = lambda *args, **kwargs: entering[layer]
    try:
        yield
    finally:
        for block in skipped:
            del block.forward


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Study(Result):
    """Result of running a model."""

    model: str  # its name
    source: str = ""  # origin of the inputs
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @classmethod
    def of(cls, runner: Runner, **measured: Any) -> Self:
        """The result of what was measured while the model ran."""
        measured.setdefault("model", runner.model.title)
        return cls(**measured, provenance=Provenance.of(runner.model.checkpoint))
