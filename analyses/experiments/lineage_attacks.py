"""Attack `ws.lineage` as somebody would who knows how it works, and measure what each attack costs.

    python -m analyses.experiments.lineage_attacks --tiny TRAINED/ --model embedded --model SMOLLM2.gguf

Framing makes a stranger look like a base's descendant; hiding makes a descendant look like a stranger; a planted
registry or print misleads anyone who looks a base up. The cost is how far the attack moves the model's predictions on
text: the KL divergence, and the share of tokens predicted first that stay the same. TRAINED is
a folder of tiny models (toys/train_lineage.py).
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

import weightscope as ws
from analyses.inputs import out_option
from tests.support.plants.derivations import drifted, rotated, stream_permuted
from tests.support.plants.named_parts import Part, Weights, read_weights, write_weights
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.progress import bar
from weightscope.core.tables import Table
from weightscope.model.sources import folder_names
from weightscope.pairs.lineage.probes import signs
from weightscope.pairs.lineage.sketches import SKETCH, Sketches, fingerprint

WINDOWS, LENGTH = 24, 64  # of text, on which predictions are compared
PLACES = 8  # fingerprints of a registry that used to be compared
HEADER = ("attack", "strength", "model", "kl", "first_kept", "changed", "verdict", "p_value", "base")


class Attacked(NamedTuple):
    """A suspect in a folder, the base to compare it with, and the renumbering of its tokens, if any."""

    suspect: str | Path
    bases: list[str | Path]
    moved: np.ndarray | None = None  # new id of each token


@dataclass(frozen=True)
class Attack:
    """One attack at one strength; `make` turns the victim's weights into a suspect in a folder."""

    name: str
    strength: str
    make: Callable[[Weights, Path], Attacked]


# Framing


def framed(stranger: Weights, base: Sketches, cosine: float) -> Weights:
    """A stranger whose public sketches have this cosine with a base's: the smallest change of W_Q and W_O that does it.

    A sketch y_k = u_k' W v_k is linear in W_Q and in W_O: 128 equations for d r unknowns of each head.
    """
    d, r = stranger.size("width"), stranger.size("head_dim")
    n_heads, shared = stranger.size("heads"), stranger.size("heads") // stranger.size("kv_heads")
    u, v = (signs(SKETCH, d, side).astype(np.float64) for side in ("left", "right"))  # (K, d)
    traces = np.vecdot(u, v)[:, None, None] / d
    changed: dict[Part, np.ndarray] = {}
    for i in bar(stranger.layers(), "heads framed", "layer"):
        targets = base.of_layer(base.layers[i % len(base.layers)])
        gain = _gain(stranger, i)
        w = {name: stranger.parts[i, f"{name}.w"].astype(np.float64) for name in "qkvo"}
        for h in range(n_heads):
            own, group = slice(h * r, (h + 1) * r), slice(h // shared * r, (h // shared + 1) * r)
            aim = base.direct[targets[h % len(targets)]].astype(np.float64)  # (2, K)
            k, values = (_read(stranger, i, w[name][:, group]) for name in "kv")
            # <u v' - (u'v / d) 1, W> for W = Q K', by Q; and for W = V O, by O'
            by_q = u[:, :, None] * (v @ k)[:, None] - traces * k  # (K, d, r)
            by_o = v[:, :, None] * (u @ values)[:, None] - traces * values
            q = w["q"][:, own]
            w["q"][:, own] = q + _least(_written(stranger, i, by_q), q, aim[0], cosine, gain)
            w["o"][own] += _least(by_o, w["o"][own].T, aim[1], cosine).T
        changed |= {(i, "q.w"): w["q"], (i, "o.w"): w["o"]}
    return stranger.but(changed)


def _gain(weights: Weights, layer: int) -> np.ndarray:
    return weights.parts[layer, "norm_1.w"].astype(np.float64)[:, None] + weights.dialect.offset


def _read(weights: Weights, layer: int, w: np.ndarray) -> np.ndarray:
    """A matrix (d, r) that reads the stream, with the norm before it folded in."""
    w = _gain(weights, layer) * w
    return w if weights.dialect.rms else w - w.mean(axis=0)


def _written(weights: Weights, layer: int, by_read: np.ndarray) -> np.ndarray:
    """A derivative (K, d, r) by a folded matrix, as one by the matrix itself."""
    centred = by_read if weights.dialect.rms else by_read - by_read.mean(axis=1, keepdims=True)
    return _gain(weights, layer) * centred


def _least(by_w: np.ndarray, w: np.ndarray, aim: np.ndarray, cosine: float, *_: Any) -> np.ndarray:
    """The smallest change of w (d, r) that gives its sketch, by_w w, this cosine with `aim` and leaves its norm."""
    flat = by_w.reshape(SKETCH, -1)
    sketch = flat @ w.ravel()
    across = sketch - (sketch @ aim) * aim
    across *= np.sqrt(1 - cosine**2) / np.linalg.norm(across)
    wanted = np.linalg.norm(sketch) * (across + cosine * aim)
    inner = flat @ flat.T
    solved = np.linalg.lstsq(inner, wanted - sketch, rcond=1e-10)[0]
    return (flat.T @ solved).reshape(w.shape)


def random_base(weights: Weights) -> Weights:
    """A model of the same shape that shares nothing: normal numbers of the same mean and spread."""
    rng = np.random.default_rng(6)
    return weights.but({
        part: w.mean() + (w.std() + 0.1 * (w.ndim == 1)) * rng.standard_normal(w.shape, np.float32)
        for part, w in weights.parts.items()
    })  # fmt: skip


def mixed(stranger: Weights, base: Weights, share: float) -> Weights:
    """A stranger with this share of a base's attention matrices added, in the units of its own: no trick at all."""
    changed = {}
    for part in [part for part in stranger.parts if part[1] in ("q.w", "k.w", "v.w", "o.w")]:
        w, theirs = stranger.parts[part], base.parts.get(part)
        if theirs is not None and theirs.shape == w.shape:
            changed[part] = w + share * np.linalg.norm(w) / np.linalg.norm(theirs) * theirs
    return stranger.but(changed)


# Hiding


def hidden(weights: Weights, cut: int = 0, noise: float = 0.0, blur: float = 0.0) -> tuple[Weights, np.ndarray]:
    """A model in another basis with its tokens renumbered, which keeps its function, and the new ids of its tokens.

    Then the `cut` smallest singular values of each W_VO are dropped, and `noise`, a share of each matrix, is added; to
    token embeddings also `blur`.
    """
    made = rotated(weights) if weights.dialect.rms and not weights.dialect.offset else stream_permuted(weights)
    order = np.random.default_rng(5).permutation(weights.size("vocabulary"))
    tables = {part: made.parts[part][order] for part in ((None, "tokens"), (None, "unembedding")) if part in made.parts}
    rng = np.random.default_rng(7)
    tables |= {part: w + blur * w.std() * rng.standard_normal(w.shape) for part, w in tables.items() if blur}
    made = _cut(made.but(tables), cut) if cut else made.but(tables)
    return (drifted(made, noise) if noise else made), np.argsort(order)


def _cut(weights: Weights, cut: int) -> Weights:
    """Every W_VO without its smallest singular values: W_O projected, so that shared values stay as they are."""
    r, shared = weights.size("head_dim"), weights.size("heads") // weights.size("kv_heads")
    changed = {}
    for i in weights.layers():
        w_v, w_o = (weights.parts[i, name].astype(np.float64) for name in ("v.w", "o.w"))
        w_o = w_o.copy()
        for h in range(weights.size("heads")):
            own, group = slice(h * r, (h + 1) * r), slice(h // shared * r, (h // shared + 1) * r)
            values = _read(weights, i, w_v[:, group])
            triangle = np.linalg.qr(values, mode="r")
            left, _, _ = np.linalg.svd(triangle @ w_o[own])
            kept = np.linalg.solve(triangle, left[:, : r - cut])
            w_o[own] = kept @ (left[:, : r - cut].T @ triangle @ w_o[own])
        changed[i, "o.w"] = w_o
    return weights.but(changed)


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


# Registries and prints


def forged(path: Path, name: str, heads: Sketches, layers: Sketches | None = None) -> None:
    """A fingerprint file of one checkpoint's heads, under any name, with another's rows for layers."""
    from safetensors.numpy import load_file, save_file

    heads.called(name).save(path)
    if layers is None:
        return
    layers.save(path.with_suffix(".true"))
    arrays, true = load_file(path), load_file(path.with_suffix(".true"))
    arrays |= {key: array for key, array in true.items() if key.startswith("layers_")}
    about = json.dumps({"version": 1, **heads.called(name).about})
    save_file(arrays, path, {"weightscope": about})
    path.with_suffix(".true").unlink()


def planted(suspect: Weights, base: Sketches, folder: Path, plant: Callable[[Path, int], None], count: int) -> Attacked:
    """A suspect tuned from a base, and a registry with the base's print and `count` planted ones."""
    prints = folder / "prints"
    prints.mkdir(parents=True)
    base.save(prints / "true.wsf")
    for k in range(count):
        plant(prints / f"planted-{k:02}.wsf", k)
    write_weights(drifted(suspect, 0.1), folder / "suspect")
    return Attacked(folder / "suspect", [prints])


def blurred(base: Sketches, k: int) -> Sketches:
    """A base's print with a little noise: neither equal to it nor worse."""
    rng = np.random.default_rng(k)
    noise = 0.01 * rng.standard_normal(base.direct.shape)
    return replace(base, direct=(base.direct + noise).astype(np.float32))


# All of them


def attacks(victim: Weights, victim_folder: Path, noisy_name: str = "meta-llama/Llama-3.1-8B") -> Iterator[Attack]:
    """Every attack at its strengths."""

    def framing(made: Callable[[Weights, Weights, Path], Weights]) -> Callable[[Weights, Path], Attacked]:
        """A suspect made of the victim and a base of random weights, which is in a folder."""

        def make(weights: Weights, folder: Path) -> Attacked:
            base = random_base(weights)
            write_weights(base, folder / "random")
            write_weights(made(weights, base, folder / "random"), folder / "suspect")
            return Attacked(folder / "suspect", [folder / "random"])

        return make

    def fitting(cosine: float) -> Callable[[Weights, Path], Attacked]:
        return framing(lambda weights, _, folder: framed(weights, fingerprint(folder), cosine))

    def mixing(share: float) -> Callable[[Weights, Path], Attacked]:
        return framing(lambda weights, base, _: mixed(weights, base, share))

    def copying(times: int) -> Callable[[Weights, Path], Attacked]:
        """Tensors that no layer reads, copied from the base."""
        return framing(lambda weights, base, _: weights.but({
            (None, f"extra.{k}.weight"): base.parts[k % len(base.layers()), "up.w"] for k in range(times)
        }))  # fmt: skip

    def writing(scale: float) -> Callable[[Weights, Path], Attacked]:
        """The base's layers after the stranger's own, their outputs scaled down."""

        def made(weights: Weights, base: Weights, _: Path) -> Weights:
            n = weights.size("layers")
            after = {(n + part[0], part[1]): scale * w if part[1][0] in "od" else w
                     for part, w in base.parts.items() if part[0] is not None}  # fmt: skip
            return weights.but(after).resized(layers=2 * n)

        return framing(made)

    def hiding(cut: int, noise: float, blur: float = 0.0) -> Callable[[Weights, Path], Attacked]:
        def make(weights: Weights, folder: Path) -> Attacked:
            made, moved = hidden(weights, cut, noise, blur)
            write_weights(made, folder / "suspect")
            return Attacked(folder / "suspect", [victim_folder], moved)

        return make

    def registry(count: int, plant: Callable[[Sketches, Sketches, Path, int], None]) -> Callable[..., Attacked]:
        def make(weights: Weights, folder: Path) -> Attacked:
            base = fingerprint(victim_folder)
            write_weights(random_base(weights), folder / "random")
            stranger = fingerprint(folder / "random")
            return planted(weights, base, folder, lambda path, k: plant(base, stranger, path, k), count)

        return make

    def other_layers(base: Sketches, stranger: Sketches, path: Path, k: int) -> None:
        forged(path, f"planted-{k}", stranger, base)

    def copies(base: Sketches, stranger: Sketches, path: Path, k: int) -> None:
        forged(path, f"planted-{k}", blurred(base, k))

    def calls_itself(weights: Weights, folder: Path) -> Attacked:
        write_weights(drifted(weights, 0.1), folder / "suspect")
        forged(folder / "base.wsf", noisy_name, fingerprint(victim_folder))
        return Attacked(folder / "suspect", [folder / "base.wsf"])

    for cosine in (0.15, 0.33, 0.9):
        yield Attack("framing by public signs", f"cosine {cosine}", fitting(cosine))
    for share in (0.1, 0.3, 0.6):
        yield Attack("framing by adding the base's attention", f"{share:.0%}", mixing(share))
    for times in (1, 2, 4):
        yield Attack("framing by tensors that nothing reads", f"{times} of the base's", copying(times))
    for scale in (1e-4, 0.01, 0.1):
        yield Attack("framing by layers that hardly write", f"{scale:g} of their size", writing(scale))
    for cut, noise in ((0, 0.0), (1, 0.0), (4, 0.0), (1, 0.02), (1, 0.1), (1, 0.3)):
        yield Attack("hiding: rotated, tokens renumbered", f"{cut} cut, noise {noise:.0%}", hiding(cut, noise))
    for blur in (0.3, 0.6, 1.2):
        yield Attack("hiding: the same, embeddings blurred", f"1 cut, noise {blur:.0%}", hiding(1, 0.0, blur))
    for count in (PLACES, 2 * PLACES, 8 * PLACES):
        yield Attack("registry: prints with forged layers", f"{count} files", registry(count, other_layers))
        yield Attack("registry: copies under other names", f"{count} files", registry(count, copies))
    yield Attack("print under another name", "1 file", calls_itself)


def judged(attack: Attack, victim: Weights, before: np.ndarray, tokens: np.ndarray, folder: Path) -> dict[str, Any]:
    """One row of HEADER."""
    made = attack.make(victim, folder)
    result = ws.lineage(made.suspect, made.bases)
    kl, kept, changed = np.nan, np.nan, np.nan
    if "registry" not in attack.name and "print" not in attack.name:
        ids = tokens if made.moved is None else made.moved[tokens]
        kl, kept = cost(before, predictions(Path(made.suspect), ids), made.moved)
        changed = np.nan if made.moved is not None else changed_by(victim, read_weights_loosely(made.suspect, victim))
    return {
        "attack": attack.name, "strength": attack.strength, "kl": kl, "first_kept": kept, "changed": changed,
        "verdict": result.verdict, "p_value": float(result.p_value), "base": str(result.base or ""),
        "lead": result.lead,
    }  # fmt: skip


def read_weights_loosely(folder: str | Path, victim: Weights) -> Weights:
    """A suspect's weights, without tensors that the victim has not."""
    try:
        return read_weights(folder)
    except ws.CheckpointError:
        return victim


@click.command(cls=EndsInOneLine)
@click.option("--tiny", type=click.Path(path_type=Path), help="Folder of tiny models; the first Llama is attacked.")
@click.option("--model", "models", multiple=True, help="A checkpoint to attack, too. May be repeated.")
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Text on which predictions are compared.")
@click.option("--only", default="", help="Only attacks whose name and strength match this regular expression.")
@out_option("out/lineage-attacks")
def main(tiny: Path | None, models: tuple[str, ...], text: Path, only: str, out: Path) -> None:
    """Run all attacks, and write attacks.csv."""
    victims = [*([str(tiny / "llama-0")] if tiny else []), *models]
    rows = []
    for source, title in zip(victims, folder_names(victims), strict=True):
        with scratch_folder() as scratch:
            victim = read_weights(source)
            write_weights(victim, scratch / "victim")
            tokens = windows(source, str(text)) % victim.size("vocabulary")
            before = predictions(scratch / "victim", tokens)
            for attack in bar(list(attacks(victim, scratch / "victim")), title, "attack"):
                if not re.search(only, f"{attack.name}, {attack.strength}"):
                    continue
                with scratch_folder() as folder:
                    row = judged(attack, victim, before, tokens, folder) | {"model": title}
                click.echo(f"{title}: {attack.name}, {attack.strength}: {row['verdict']} p {row['p_value']:.2g} "
                           f"KL {row['kl']:.3g} kept {row['first_kept']:.3f}\n    {row['lead'][:400]}")  # fmt: skip
                rows.append(row)
    table = Table.of_rows(HEADER, [[row[key] for key in HEADER] for row in rows])
    Folder(out).text("attacks.csv", table.csv())


if __name__ == "__main__":
    main()
