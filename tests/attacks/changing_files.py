"""Commands on files that another thread cuts, removes and overwrites meanwhile.

`python -m tests.attacks.changing_files SECONDS SEED` runs them for longer.
Every command must end with its result, or with one line and status 2.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.figures import undrawn
from weightscope.cli import main

SMALL = Path(ws.__file__).parent / "core" / "embedded"
COMMANDS = (
    "audit MODEL --out OUT", "audit MODEL --all --resume --out KEPT", "compare MODEL MODEL --all --out OUT",
    "inspect MODEL --check", "inspect MODEL", "neighbours MODEL ibility --head 6", "circuits MODEL --out OUT",
    "bigrams TEXT --tokenizer MODEL --out OUT.npz",
    "id MODEL --out OUT.id.json", "same A.id.json MODEL", "same MODEL OTHER", "card MODEL --base OTHER --out OUT.md",
    "learned MODEL OTHER --out OUT", "lineage OTHER MODEL --attest OUT.json", "atlas LIST --resume --out ATLAS",
)  # fmt: skip
STATUSES = (0, 2, 3, 4)  # a result, one line, and what a gate or a verdict says of files that have changed


def spoil(contents: dict[Path, bytes], rng: random.Random, stop: Event) -> None:
    """Cut, remove or change one of the files, and put it right again, until told to stop."""
    while not stop.is_set():
        path, content = rng.choice(list(contents.items()))
        changed = bytearray(content)
        for _ in range(5):
            changed[rng.randrange(len(content))] = rng.randrange(256)
        match rng.randrange(3):
            case 0:
                path.write_bytes(content[: rng.randrange(len(content))])
            case 1:
                path.unlink()
            case 2:
                path.write_bytes(changed)
        stop.wait(0.02 * rng.random())
        path.write_bytes(content)
        stop.wait(0.1 * rng.random())


def run(seconds: float, seed: int, commands: Sequence[str] = COMMANDS) -> Counter[str]:
    """How the commands ended: how often each with which status."""
    outcomes, rng, stop = Counter[str](), random.Random(seed), Event()
    with tempfile.TemporaryDirectory() as temporary, undrawn():
        folder = Path(temporary)
        model, text = folder / "model", folder / "text.txt"
        shutil.copytree(SMALL, model)
        text.write_text("the cat sat on the mat. " * 20_000)
        scaled, kept_id, listing = folder / "scaled", folder / "a.id.json", folder / "list.txt"
        shutil.copytree(SMALL, scaled)
        tensors = load_file(SMALL / "model.safetensors")
        save_file({name: 1.01 * w for name, w in tensors.items()}, scaled / "model.safetensors")
        kept_id.write_text(json.dumps(ws.identity(SMALL).as_json()))
        listing.write_text(f"{model}\n{scaled}\n")
        spoilt = (*model.iterdir(), *scaled.iterdir(), text, kept_id)
        contents = {path: path.read_bytes() for path in spoilt if path.is_file()}
        thread = Thread(target=spoil, args=(contents, random.Random(seed + 1), stop))
        thread.start()
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                words = rng.choice(commands)
                places = {"MODEL": model, "TEXT": text, "KEPT": folder / "kept", "OUT": folder / str(outcomes.total())}
                places |= {"OTHER": scaled, "A.id.json": kept_id, "LIST": listing, "ATLAS": folder / "atlas"}
                for ending in (".npz", ".id.json", ".md", ".json"):
                    places[f"OUT{ending}"] = folder / f"{outcomes.total()}{ending}"
                done = CliRunner().invoke(main, [str(places.get(word, word)) for word in words.split()])
                if done.exception is not None and not isinstance(done.exception, SystemExit):
                    raise AssertionError(f"{words}, seed {seed}") from done.exception
                assert done.exit_code in STATUSES, (words, done.output)
                outcomes[f"{words.split()[0]}: {done.exit_code}"] += 1
        finally:
            stop.set()
            thread.join()
    return outcomes


if __name__ == "__main__":
    for outcome, count in sorted(run(float(sys.argv[1]), int(sys.argv[2])).items()):
        print(f"{count:6} {outcome}")
