"""What is mutated, how often, and what is done with it."""

import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import adapters, audited, checkpoints, gguf, lists, tokenizers, vocabularies, workers
from tests.fuzz.against import configs as as_auto_config
from tests.fuzz.against import gguf as as_gguf
from tests.fuzz.against import safetensors as as_safetensors
from tests.fuzz.against import vocabularies as as_tokenizers


class Target(NamedTuple):
    """Something that strangers write.

    Attributes
    ----------
    share : int
        How often it is tried, in relation to the others; less where a trial takes long.
    mutant : function of a random generator
        What is read.
    meet : function of a folder and of that
        Reads it, and says in a few words what became of it. Raises whatever is neither.
    seconds : float
        Processor time that one may take.
    """

    share: int
    mutant: Callable[[random.Random], bytes]
    meet: Callable[[Path, bytes], str]
    seconds: float = 1.0


TARGETS = {
    name: Target(200, partial(checkpoints.mutant, name), partial(checkpoints.meet, name)) for name in checkpoints.SEEDS
} | {
    "as safetensors reads": Target(200, as_safetensors.mutant, as_safetensors.meet),
    "as gguf reads": Target(200, as_gguf.mutant, as_gguf.meet),
    "as AutoConfig reads": Target(200, as_auto_config.mutant, as_auto_config.meet, 20.0),  # imports transformers
    "as tokenizers reads": Target(12, tokenizers.mutant, as_tokenizers.meet),  # in a process of its own
    "keys and tensors.gguf": Target(200, gguf.mutant, gguf.meet),
    "tokenizer.model": Target(200, vocabularies.sentencepiece, vocabularies.meet_sentencepiece),
    "adapter": Target(100, adapters.mutant, adapters.meet),
    "list.txt": Target(200, lists.mutant, lists.meet),
    "a worker's answer": Target(50, workers.mutant, workers.meet),  # writes files
    "tokenizer.json": Target(12, tokenizers.mutant, tokenizers.meet),  # in a process of its own
    "vocab.txt": Target(12, vocabularies.vocab, vocabularies.meet_vocab),  # likewise
    "audited weights": Target(2, audited.weights, audited.meet_weights, 20.0),
    "audited adapter": Target(2, adapters.mutant, audited.meet_adapter, 20.0),
}


def fuzz(n: int, seed: int, names: list[str] | None = None) -> Counter[str]:
    """Meet n mutants, of all targets or of these, and count the outcomes; raise what is neither read nor refused."""
    rng, outcomes = random.Random(seed), Counter[str]()
    names = names or list(TARGETS)
    shares = [TARGETS[name].share for name in names]
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("error")
        folders = {name: Path(temporary, str(number)) for number, name in enumerate(names)}
        for folder in folders.values():
            folder.mkdir()
        for number in range(n):
            (name,) = rng.choices(names, shares)
            target = TARGETS[name]
            content = target.mutant(rng)
            which = f"mutant {number} of seed {seed}, {name}"
            try:
                outcome, took = timed(target, folders[name], content)
                if took >= target.seconds:  # the first to need a module imports it
                    outcome, took = timed(target, folders[name], content)
            except BaseException as error:
                raise AssertionError(f"{which}: {content[:1000]!r}") from error
            outcomes[f"{name}: {outcome}"] += 1
            assert took < target.seconds, f"{which}, takes {took:.1f} s: {content[:1000]!r}"
    return outcomes


def timed(target: Target, folder: Path, content: bytes) -> tuple[str, float]:
    """What became of a mutant, and the processor time that it took."""
    started = time.process_time()
    outcome = target.meet(folder, content)
    return outcome, time.process_time() - started
