"""A model that a local server makes up when it is asked for: of its weights nothing is stored."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.synthetic import BLOCK, DEVIATION, Sizes, cut_to_bf16, write
from tests.support.hub_server import Hole, serve

CACHED_BYTES = 10**9  # of a streamed model; older blocks of its cache are deleted


class MadeUp(Hole):
    """A file with the header of a sparse one and the same random values again and again, at an odd period.

    Each file starts elsewhere in them: layers at the same place in two files would be equal.
    """

    def __init__(self, path: Path, number: int) -> None:
        with path.open("rb") as file:
            length = file.read(8)
            super().__init__(length + file.read(int.from_bytes(length, "little")), path.stat().st_size)
        values = np.random.default_rng(0).standard_normal(BLOCK + 1, np.float32) * np.float32(DEVIATION)
        self.values = np.roll(cut_to_bf16(values), -7919 * number).tobytes()

    def __getitem__(self, span: slice) -> bytes:
        begin, end, _ = span.indices(self.size)
        content = [self.start[begin:end]]
        position = max(begin, len(self.start))
        while position < end:
            first = (position - len(self.start)) % len(self.values)
            content.append(self.values[first : first + end - position])
            position += len(content[-1])
        return b"".join(content)


@contextmanager
def served(sizes: Sizes, top: Path) -> Iterator[str]:
    """The name of a model that a server streams; of its weights nothing is stored but the last `CACHED_BYTES` read."""
    folder, home, done = write(top / "headers", sizes, shards=16, holes=True), top / "home", threading.Event()

    def forget() -> None:
        while not done.wait(0.2):
            blocks, kept = home.glob("assets/weightscope/blocks/*/[0-9]*"), 0
            for path in sorted(blocks, key=lambda path: path.stat().st_mtime, reverse=True):
                kept += path.stat().st_size
                if kept > CACHED_BYTES:
                    path.unlink(missing_ok=True)

    with serve() as hub, mock.patch.dict(os.environ, HF_ENDPOINT=hub.hub, HF_TOKEN="", HF_HOME=str(home)):
        hub.repositories["owner/model"] = {
            path.name: MadeUp(path, number) if path.suffix == ".safetensors" else path.read_bytes()
            for number, path in enumerate(sorted(folder.iterdir()))
        }
        forgetting = threading.Thread(target=forget)
        forgetting.start()
        try:
            yield "owner/model"
        finally:
            done.set()
            forgetting.join()
