"""Fuzzing guided by coverage: `python -m tests.fuzz.guided HARNESS --seconds N --corpus DIR` (needs Atheris).

A run continues from what the corpus has; an input that fails is written next to it. `--keep` puts some
into the harness's kept corpus, which tests/test_guided.py meets without Atheris.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.fuzz.oss.harness import HARNESSES, corpus, corpus_file
from tests.fuzz.oss.seeds import SEEDS_OF
from weightscope.model.rows.table import FAMILIES

SECONDS, MEGABYTES = 10, 3000  # that one input may take
LARGEST_INPUT = 6_000  # bytes
LARGEST_KEPT = 15_000  # bytes of a kept corpus, without its directory of names
WORDS = re.compile(r"[\w.{}-]{2,40}")
STATUS = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")


def run(name: str, *arguments: object) -> tuple[int, str]:
    """Run a harness with libFuzzer's arguments: its status, and what it said."""
    command = [sys.executable, "-m", f"tests.fuzz.oss.fuzz_{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.returncode, done.stderr + done.stdout


def fuzz(name: str, seconds: int, folder: Path) -> int:
    """Fuzz into a folder; print how often, what is covered, and an input that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        seeds = [*SEEDS_OF[name](), *(corpus(name) if corpus_file(name).exists() else ())]
        for content in seeds:
            write(folder, content)
    limits = f"-max_total_time={seconds}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}", "-max_len=20000"
    artifacts = f"-artifact_prefix={folder.parent}/{name}-"
    status, said = run(name, folder, *limits, *dictionary(name, folder), artifacts, "-print_final_stats=1")
    folder.with_name(f"{name}.log").write_text(said)
    covered = STATUS.findall(said)
    executed = re.findall(r"number_of_executed_units:\s*(\d+)", said)
    print(f"{name}: executions {executed[-1:]}, edges, features and inputs {covered[:1]} -> {covered[-1:]}")
    if status:
        print(said[-4000:])
    return status


def dictionary(name: str, folder: Path) -> list[str]:
    """The option for a file of words that inputs are made of, where JSON's own values are not enough."""
    if name != "rows":
        return []
    words = {word for text in FAMILIES.texts.values() for word in WORDS.findall(text)}
    path = folder.with_name(f"{name}.dict")
    path.write_text("".join(f'"{word}"\n' for word in sorted(words)))
    return [f"-dict={path}"]


def write(folder: Path, content: bytes) -> None:
    """Write an input under libFuzzer's name for it."""
    (folder / hashlib.sha1(content).hexdigest()).write_bytes(content)


def keep(name: str, folder: Path) -> None:
    """Keep inputs that are not large in the order of their names, which are digests, as many as fit."""
    with zipfile.ZipFile(corpus_file(name), "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(path for path in folder.iterdir() if path.stat().st_size < LARGEST_INPUT):
            entry = zipfile.ZipInfo(path.name)  # of no time, so that the same inputs are the same file
            file.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
            assert file.fp is not None
            if file.fp.tell() > LARGEST_KEPT:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("harness", choices=HARNESSES)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    folder = given.corpus or Path("out", "fuzz", given.harness)
    status = fuzz(given.harness, given.seconds, folder) if given.seconds else 0
    if given.keep and not status:
        keep(given.harness, folder)
    sys.exit(status)


if __name__ == "__main__":
    main()
