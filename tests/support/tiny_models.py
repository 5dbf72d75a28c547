"""The fixtures of this folder, opened: tiny models written by transformers, and what its eager attention computed."""

import shutil
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.cases import CASES, Case, case_of
from tests.support.slow import mostly_checked

FIXTURES = Path(__file__).parents[1] / "model" / "rows" / "fixtures"


@dataclass(frozen=True)
class Fixture:
    """One fixture, opened.

    Attributes
    ----------
    case : Case
    folder : Path
    """

    case: Case
    folder: Path

    @cached_property
    def model(self) -> ws.Model:
        return ws.open_model(self.folder, tower=self.case.tower or None)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "expected.npz") as file:
            return dict(file)

    @property
    def layers(self) -> list[int]:
        """The attention layers that there are arrays of."""
        return sorted(int(name.removeprefix("scores")) for name in self.arrays if name.startswith("scores"))


@lru_cache(None)
def fixture(name: str) -> Fixture:
    """The fixture of that name, opened once."""
    case = case_of(name)
    return Fixture(case, FIXTURES / name)


NAMES = [case.name for case in CASES]

# A fixture of each mechanism: learned positions, rotation, ALiBi, relative positions, buckets, latents, caps, sinks,
# gates, differences of maps, shared keys, a projected embedding, towers, patches.
MECHANISMS = {
    "gpt2", "smollm3", "bloom", "deberta_v3_relative", "t5_decoder", "deepseek_v3", "gemma2", "gpt_oss", "qwen3_next",
    "diffllama", "gemma4", "electra", "clip_text", "dinov3_vit",
}  # fmt: skip
assert set(NAMES) >= MECHANISMS
# For tests too slow to run on every fixture in `make test`: those above there, the rest in `make check`.
EACH_MECHANISM = mostly_checked(NAMES, fast=MECHANISMS)


def softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Probabilities of scores (H, n, n), with a learned sink (H,) as one more key that takes mass and gives nothing."""
    if sinks is not None:
        more = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate((scores, more), axis=-1), None)[..., :-1]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def centred(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Scores less each row's mean over the keys that are `seen`, zero elsewhere: a softmax depends on nothing else."""
    kept = np.where(seen, scores, 0)
    return np.where(seen, kept - kept.sum(-1, keepdims=True) / seen.sum(-1, keepdims=True), 0)


def changed(fixture: str, folder: Path, change) -> Path:
    """A copy of a fixture whose floats are changed."""
    shutil.copytree(FIXTURES / fixture, folder)
    weights = load_file(folder / "model.safetensors")
    floats = {name: w for name, w in weights.items() if w.dtype.kind == "f"}
    save_file(weights | {name: change(w).astype(w.dtype) for name, w in floats.items()}, folder / "model.safetensors")
    return folder
