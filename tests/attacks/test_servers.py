"""A server that hangs, lies or never ends, asked for a sample of a checkpoint, as `atlas` does, and for all of it.

Every attack ends in one CheckpointError within a time that the server does not choose, and in little memory.
"""

import json
import time
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import Sizes, write
from tests.support.hub_server import BOMB, COMMIT, Hub
from weightscope.checkpoint import http
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.sources import Source
from weightscope.pairs.atlas.prints import make_print

SECONDS, MEGABYTES = 60.0, 150
FOREVER, TOO_SLOW = {"forever": True}, "a second are expected"
# What the server does, and what the reader sees. None is an honest answer, to the request for the header.
ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "silence from the first": ({"faults": ["silent"]}, "5 times in a row"),
    "silence behind the header": ({"faults": [None, "silent"]}, "5 times in a row"),
    "no answer": ({"faults": [None, "drop"]}, "cannot be reached"),
    "bytes of another range": ({"faults": [None, "other range"]}, "was asked for"),
    "a range of another file": ({"faults": [None, "other size"]}, "was asked for"),
    "a range that is not named": ({"faults": [None, "no range"]}, "the server sent range 'None'"),
    "the whole file": ({"faults": [None, "ignores range"]}, "would send the whole file"),
    "a page": ({"faults": [None, "page instead"]}, "would send the whole file"),
    "half of it": ({"faults": [None, "short length"]}, "were asked for"),
    "a byte too many": ({"faults": [None, "longer"]}, "more bytes than were asked for"),
    "a byte too few": ({"faults": [None, "shorter"]}, "5 times in a row"),
    "two thirds": ({"faults": [None, "breaks off"]}, "5 times in a row"),
    "a byte now and then": ({"faults": [None, "trickles"]}, TOO_SLOW),
    "another etag": ({"faults": [None, "other etag"]}, "has changed on the server"),
    "an etag for each range": ({"faults": ["other etag each time"]}, "has changed on the server"),
    "an etag for each range, without a storage": (
        {"faults": [None, "other etag each time"], "redirect": False}, "has changed on the server"),
    "a bomb": ({"faults": [None, "bomb"]}, "an encoded body"),
    "errors": ({"faults": [None, "503"]}, "the server answered 503, 5 times in a row"),
    "no such range": ({"faults": [None, "416"]}, "the server answered 416"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write(tmp_path_factory.mktemp("tiny"), Sizes(layers=4, inner=96))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def slowly(hub: Hub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A server with a repository; what it may take is short."""
    hub.repositories["owner/tiny"] = dict(tiny)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    return hub


def whole(name: str) -> None:
    for tensor in open_checkpoint(name).values():
        tensor.read()


READERS = {"a sample": lambda name: make_print(Source.named(name)), "all": whole}


def refused(read: str) -> str:
    """The message that reading ends in, soon and in little memory."""
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(CheckpointError) as caught:
            READERS[read]("owner/tiny")
        assert time.monotonic() - start < SECONDS
        assert tracemalloc.get_traced_memory()[1] < MEGABYTES * 10**6
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_an_honest_server_is_read(slowly: Hub) -> None:
    for read in READERS.values():
        read("owner/tiny")


@pytest.mark.check
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("attack", ANSWERS)
def test_an_answer_that_lies_or_never_comes(
    attack: str, read: str, slowly: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, expected = ANSWERS[attack]
    for name, value in (deepcopy(changes) | FOREVER).items():
        setattr(slowly, name, value)
    if expected == TOO_SLOW:
        monkeypatch.setattr(http, "PATIENCE", 2.0)
        monkeypatch.setattr(http, "LEAST_RATE", 10**9)
    assert expected in refused(read)


def test_many_answers_that_are_each_just_in_time(slowly: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request may wait; hundreds of them together may not hold a run for days."""
    monkeypatch.setattr(http, "DEADLINE", 2.0)
    monkeypatch.setattr(http, "USUAL_WAIT", 0.0)
    monkeypatch.setattr(http, "LEAST_RATE", 10**9)
    slowly.latency = 0.25
    assert TOO_SLOW in refused("a sample")


def listing(names: list[str]) -> bytes:
    return json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode()


# What the server answers in place of its list of files, without which the usual names are asked for.
LISTS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "60,000 names": (200, {}, listing([f"{i}.bin" for i in range(60_000)])),
    "names of 17 MB": (200, {}, listing(["n" * 1000] * 17_000)),
    "a bomb": (200, {"Content-Encoding": "gzip"}, BOMB),
    "redirects without end": (302, {"Location": "?again"}, b""),
    "a redirect to the disk": (302, {"Location": "file:///etc/passwd"}, b""),
    "nesting": (200, {}, b'{"siblings":' * 5000 + b"1" + b"}" * 5000),
    "names that are no texts": (200, {}, json.dumps({"sha": COMMIT, "siblings": [1, None, {"rfilename": 3}]}).encode()),
    "no list": (200, {}, b"[]"),
    "errors": (503, {}, b""),
}


@pytest.mark.parametrize("attack", LISTS)
def test_a_list_of_files_that_never_ends_or_lies(attack: str, slowly: Hub) -> None:
    """The weights are read all the same, or it is refused; no time or memory is lost on the list."""
    slowly.answers["/api/"] = LISTS[attack]
    tracemalloc.start()
    start = time.monotonic()
    try:
        whole("owner/tiny")
    except CheckpointError as error:
        assert str(error).isprintable()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.monotonic() - start < SECONDS
    assert peak < MEGABYTES * 10**6


# Whole answers about a small file: status, headers and body of config.json.
SMALL: dict[str, tuple[tuple[int, dict[str, str], bytes], str]] = {
    "a bomb": ((200, {"Content-Encoding": "gzip", "X-Repo-Commit": COMMIT, "ETag": '"e"'}, BOMB), ""),
    "redirects without end": ((302, {"Location": "?again"}, b""), "redirects more than 5 times"),
    "errors": ((500, {}, b""), "the Hub answered 500, 3 times in a row"),
}


@pytest.mark.parametrize("attack", SMALL)
def test_a_config_that_never_ends_or_lies(attack: str, slowly: Hub, tmp_path: Path) -> None:
    answer, expected = SMALL[attack]
    slowly.answers["/owner/tiny/resolve/main/config.json"] = answer
    slowly.answers[f"/owner/tiny/resolve/{COMMIT}/config.json"] = answer
    assert expected in refused("all")
    assert not list(tmp_path.rglob("config.json"))
