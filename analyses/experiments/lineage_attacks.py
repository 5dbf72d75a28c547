"""Attack `ws.lineage` as somebody would who knows how it works, and measure what each attack costs.

    python -m analyses.experiments.lineage_attacks --tiny TRAINED/ --model GPT2 --model SMOLLM2.gguf

Framing makes a stranger look like a base's descendant; hiding makes a descendant look like a stranger; a planted
registry or print misleads anyone who looks a base up. The cost is how far the attack moves the model's predictions on
text: the KL divergence, and the share of tokens predicted first that stay the same. TRAINED is
a folder of tiny models (toys/train_lineage.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from analyses.study import Judge, Row, judge_each, study, titled, write
from tests.support.plants.attacks import forged, framed, hidden, mixed, random_base
from tests.support.plants.derivations import drifted
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from tests.support.plants.plant import Made, Plant
from weightscope.core.files import Folder, scratch_folder
from weightscope.pairs.lineage.sketches import Sketches, fingerprint

WINDOWS, LENGTH = 24, 64  # of text, on which predictions are compared
PLACES = 8  # fingerprints of a registry that used to be compared
HEADER = ("attack", "strength", "model", "kl", "first_kept", "changed", "verdict", "p_value", "base")


# What it costs


@lru_cache(2)
def windows(source: str, text: str) -> np.ndarray:
    """Tokens of a text, of a folder the first, (WINDOWS, LENGTH)."""
    from weightscope.runner.framing import tokenizer_of

    file = min(Path(text).glob("*.txt")) if Path(text).is_dir() else Path(text)
    ids = tokenizer_of(ws.open_model(source)).encode(file.read_text()[: WINDOWS * LENGTH * 12])
    starts = np.linspace(0, len(ids) - LENGTH, WINDOWS).astype(int)
    return np.stack([ids[start : start + LENGTH] for start in starts])


def predictions(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logarithms of what the eager model predicts, (WINDOWS LENGTH, vocabulary), float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = [model(torch.from_numpy(row)[None]).logits[0] for row in tokens]
        return np.asarray(torch.cat(logits).log_softmax(-1).numpy())


def cost(before: np.ndarray, after: np.ndarray, moved: np.ndarray | None) -> tuple[float, float]:
    """Mean KL divergence from the predictions before to those after, and the share of first choices kept."""
    after = after if moved is None else after[:, moved]
    kl = float(np.mean(np.sum(np.exp(before) * (before - after), axis=1, dtype=np.float64)))
    return kl, float(np.mean(before.argmax(axis=1) == after.argmax(axis=1)))


def changed_by(weights: Weights, made: Weights) -> float:
    """|W' - W| / |W| of the matrices that differ; NaN if another basis makes it meaningless."""
    pairs = [(w, made.parts[part]) for part, w in weights.parts.items() if part in made.parts and w.ndim == 2]
    moved = [(np.linalg.norm(b - a), np.linalg.norm(a)) for a, b in pairs if a.shape == b.shape and (a != b).any()]
    return float(np.mean([d / size for d, size in moved])) if moved else 0.0


# Attacks

Make = Callable[[Path], Made]


def framing(victim: Weights, made: Callable[[Weights, Path], Weights]) -> Make:
    """A suspect made of the victim and a base of random weights, which is in a folder."""

    def make(folder: Path) -> Made:
        base = random_base(victim)
        write_weights(base, folder / "random")
        write_weights(made(base, folder / "random"), folder / "suspect")
        return Made(folder / "suspect", [folder / "random"])

    return make


def with_unread(victim: Weights, base: Weights, times: int) -> Weights:
    """Tensors that no layer reads, copied from the base."""
    copies = [base.parts[k % len(base.layers()), "up.w"] for k in range(times)]
    return victim.but({(None, f"extra.{k}.weight"): w for k, w in enumerate(copies)})


def with_layers(victim: Weights, base: Weights, scale: float) -> Weights:
    """The base's layers after the stranger's own, their outputs scaled down."""
    n = victim.size("layers")
    after = {(n + part[0], part[1]): scale * w if part[1][0] in "od" else w
             for part, w in base.parts.items() if part[0] is not None}  # fmt: skip
    return victim.but(after).resized(layers=2 * n)


def hiding(victim: Weights, base: Path, cut: int, noise: float, blur: float = 0.0) -> Make:
    """The victim in another basis; `more` has the new id of each token."""

    def make(folder: Path) -> Made:
        made, moved = hidden(victim, cut, noise, blur)
        write_weights(made, folder / "suspect")
        return Made(folder / "suspect", [base], moved)

    return make


def registry(victim: Weights, base: Path, count: int, is_copy: bool) -> Make:
    """A suspect tuned from a base, and a registry with the base's print and `count` forged ones."""

    def make(folder: Path) -> Made:
        true, prints = fingerprint(base), folder / "prints"
        write_weights(random_base(victim), folder / "random")
        stranger = fingerprint(folder / "random")
        prints.mkdir(parents=True)
        true.save(prints / "true.wsf")
        for k in range(count):
            forgery = (blurred(true, k), None) if is_copy else (stranger, true)
            forged(prints / f"planted-{k:02}.wsf", f"planted-{k}", *forgery)
        write_weights(drifted(victim, 0.1), folder / "suspect")
        return Made(folder / "suspect", [prints])

    return make


def blurred(base: Sketches, k: int) -> Sketches:
    """A base's print with a little noise: neither equal to it nor worse."""
    rng = np.random.default_rng(k)
    noise = 0.01 * rng.standard_normal(base.direct.shape)
    return replace(base, direct=(base.direct + noise).astype(np.float32))


def renamed(victim: Weights, base: Path) -> Make:
    """A suspect tuned from a base whose print calls itself another model."""

    def make(folder: Path) -> Made:
        write_weights(drifted(victim, 0.1), folder / "suspect")
        forged(folder / "base.wsf", "meta-llama/Llama-3.1-8B", fingerprint(base))
        return Made(folder / "suspect", [folder / "base.wsf"])

    return make


def attacks(victim: Weights, base: Path, title: str) -> Iterator[Plant]:
    """Every attack at its strengths, on a victim that lies in the folder `base`."""

    def attack(name: str, strength: str, make: Make) -> Plant:
        return Plant(f"{name}, {strength}", make, cells={"attack": name, "strength": strength, "model": title})

    def framed_by(change: Callable[[Weights, Path], Weights]) -> Make:
        return framing(victim, change)

    for cosine in (0.15, 0.33, 0.9):
        make = framed_by(lambda _, folder, cosine=cosine: framed(victim, fingerprint(folder), cosine))
        yield attack("framing by public signs", f"cosine {cosine}", make)
    for share in (0.1, 0.3, 0.6):
        make = framed_by(lambda random, _, share=share: mixed(victim, random, share))
        yield attack("framing by adding the base's attention", f"{share:.0%}", make)
    for times in (1, 2, 4):
        make = framed_by(lambda random, _, times=times: with_unread(victim, random, times))
        yield attack("framing by tensors that nothing reads", f"{times} of the base's", make)
    for scale in (1e-4, 0.01, 0.1):
        make = framed_by(lambda random, _, scale=scale: with_layers(victim, random, scale))
        yield attack("framing by layers that hardly write", f"{scale:g} of their size", make)
    for cut, noise in ((0, 0.0), (1, 0.0), (4, 0.0), (1, 0.02), (1, 0.1), (1, 0.3)):
        make = hiding(victim, base, cut, noise)
        yield attack("hiding: rotated, tokens renumbered", f"{cut} cut, noise {noise:.0%}", make)
    for blur in (0.3, 0.6, 1.2):
        make = hiding(victim, base, 1, 0.0, blur)
        yield attack("hiding: the same, embeddings blurred", f"1 cut, noise {blur:.0%}", make)
    for count in (PLACES, 2 * PLACES, 8 * PLACES):
        for name, is_copy in (("prints with forged layers", False), ("copies under other names", True)):
            yield attack(f"registry: {name}", f"{count} files", registry(victim, base, count, is_copy))
    yield attack("print under another name", "1 file", renamed(victim, base))


def judge_of(victim: Weights, tokens: np.ndarray, before: np.ndarray) -> Judge:
    """The judge of attacks on a victim, whose predictions `before` are on `tokens`."""

    def judged(plant: Plant, made: Made) -> Row:
        result = ws.lineage(made.suspect, made.bases)
        kl, kept, changed = np.nan, np.nan, np.nan
        if "registry" not in plant.name and "print" not in plant.name:
            ids = tokens if made.more is None else made.more[tokens]
            kl, kept = cost(before, predictions(Path(made.suspect), ids), made.more)
            if made.more is None:
                changed = changed_by(victim, read_weights_loosely(made.suspect, victim))
        return {
            "kl": kl, "first_kept": kept, "changed": changed, "verdict": result.verdict,
            "p_value": float(result.p_value), "base": str(result.base or ""),
        }  # fmt: skip

    return judged


def read_weights_loosely(folder: str | Path, victim: Weights) -> Weights:
    """A suspect's weights, without tensors that the victim has not."""
    try:
        return read_weights(folder)
    except ws.CheckpointError:
        return victim


@study("lineage-attacks")
@click.option("--tiny", type=click.Path(path_type=Path), help="Folder of tiny models; the first Llama is attacked.")
@click.option("--model", "models", multiple=True, help="A checkpoint to attack, too. May be repeated.")
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Text on which predictions are compared.")
@click.option("--only", default="", help="Only attacks whose name and strength match this regular expression.")
def main(files: Folder, tiny: Path | None, models: tuple[str, ...], text: Path, only: str) -> None:
    """Run all attacks, and write attacks.csv."""
    rows = []
    for source, title in titled([*([str(tiny / "llama-0")] if tiny else []), *models]):
        with scratch_folder() as scratch:
            victim, base = read_weights(source), scratch / "victim"
            write_weights(victim, base)
            tokens = windows(source, str(text)) % victim.size("vocabulary")
            judge = judge_of(victim, tokens, predictions(base, tokens))
            rows += judge_each(attacks(victim, base, title), judge, title, only)
    write(files, "attacks", HEADER, rows, echo=True)


if __name__ == "__main__":
    main()
