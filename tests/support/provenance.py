"""What every page's end and every result in JSON say of the files that were read, worked out again with hashlib."""

import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import weightscope
from weightscope.core.files import REPORT

ENVELOPE = {"lead", "version", "command", "date", "sources"}
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def header_of(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a safetensors file's header, its length included."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    return size, hashlib.sha256(content[:size]).hexdigest()


def envelope_in(text: str, command: list[object], *folders: Path, digest: bool = False) -> dict[str, Any]:
    """The result in JSON, in the envelope of a command over checkpoints of one file."""
    result: dict[str, Any] = json.loads(text)
    assert result.keys() >= ENVELOPE and "headline" not in result
    assert (result["version"], result["command"]) == (weightscope.__version__, typed(command))
    assert DATE.fullmatch(result["date"]) and result["lead"]
    for source, folder in zip(result["sources"], dict.fromkeys(folders), strict=True):
        weights, config = source["files"]
        path = folder / weights["name"]
        assert source["name"] == str(folder)
        assert (weights["size"], weights["header_bytes"], weights["header_sha256"]) == (
            path.stat().st_size, *header_of(path),
        )  # fmt: skip
        assert weights.get("sha256", sha256(path)) == sha256(path) and ("sha256" in weights or not digest)
        assert config == {"name": "config.json", "size": len((folder / "config.json").read_bytes()),
                          "sha256": sha256(folder / "config.json")}  # fmt: skip
    return result


def footer_of(page: Path) -> str:
    """The end of a page, unescaped."""
    footer = re.search(r"<footer>(.*)</footer>", page.read_text(), re.DOTALL)
    assert footer is not None
    return html.unescape(footer[1])


def without_command(printed: str) -> dict[str, Any]:
    """A result in JSON without what differs from one run to the next."""
    return {key: value for key, value in json.loads(printed).items() if key not in ("command", "date")}


def without_footer(file: Path) -> bytes:
    """A file's content, of a page and its JSON without what says where it comes from."""
    content = file.read_bytes()
    if file.name in REPORT and file.suffix == ".json":
        page = json.loads(content)
        return json.dumps({key: page[key] for key in page if key not in ("command", "date", "sources")}).encode()
    return re.sub(rb"<footer>.*</footer>", b"", content, flags=re.DOTALL)


def ends_with(page: Path, command: list[object], *folders: Path) -> str:
    """The end of a page, which says by which command, version and when it was made, and what was read."""
    footer = footer_of(page)
    assert f"made by weightscope {weightscope.__version__}" in footer and DATE.search(footer)
    assert f"<code>{typed(command)}</code>" in footer
    for folder in folders:
        (path,) = folder.glob("*.safetensors")
        for digest in (header_of(path)[1], sha256(folder / "config.json")):
            assert f"{folder}: " in footer and f'<code title="{digest}">{digest[:12]}…</code>' in footer
    return footer


def typed(command: list[object]) -> str:
    """A command as a shell takes it; the paths of tests need no quotes."""
    return " ".join(["weightscope", *map(str, command)])
