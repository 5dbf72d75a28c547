"""The text of a page with the output of its blocks, its tables and its pictures as they are now."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from docs.text.tables import TABLES

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "SKILL.md")
PAGES = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<not_run>^<!-- not run -->\n)?^```(?P<language>python|console)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n.*?^```\n)?",
    re.DOTALL | re.MULTILINE,
)
TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
LONGEST = 120  # seconds
PASSES = (0, 3, 4)  # exit statuses of an example: done, a gate failed, undecided


class ExampleError(Exception):
    """An example of a page failed."""


def refreshed(page: Path) -> tuple[str, dict[Path, bytes]]:
    """The page's text, and its pictures by their paths."""
    text = TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n", page.read_text("utf-8"))
    assets = ROOT / "docs" / "assets" / page.stem.lower()
    with TemporaryDirectory(prefix="weightscope-docs-") as name:
        examples = Examples(page.name, Path(name))
        text = BLOCK.sub(examples.shown, text)
        links = re.findall(rf"\]\((?:docs/)?assets/{assets.name}/([^)]+)\)", text)
        pictures = {assets / link: (Path(name) / link).read_bytes() for link in links}
    return text, pictures


class Examples:
    """The examples of one page, run in a folder that is empty at first."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page, self.folder, self.names = page, folder, dict[str, Any]()
        (folder / "tests").symlink_to(ROOT / "tests")  # for pages that name a checkpoint

    def shown(self, block: re.Match[str]) -> str:
        """One block as it belongs in the page."""
        if block["not_run"]:
            return block[0]
        if block["language"] == "console":
            lines = [line for line in block["code"].splitlines() if line.startswith("$ ")]
            return f"```console\n{''.join(map(self._command, lines))}```\n"
        printed = self._python(block["code"])
        output = f"\n```text\n{printed}```\n" if printed else ""
        return f"```python\n{block['code']}```\n{output}"

    def _python(self, code: str) -> str:
        printed = io.StringIO()
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
                exec(compile(code, self.page, "exec"), self.names)
        except Exception as error:
            raise ExampleError(f"{self.page}: {code}{error!r}") from error
        return printed.getvalue()

    def _command(self, line: str) -> str:
        program, *arguments = shlex.split(line[2:], comments=True)
        if program != "weightscope":
            raise ExampleError(f"{self.page} runs {program}; only weightscope may run")
        command = [sys.executable, "-m", program, *arguments]
        environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        if done.returncode not in PASSES:
            raise ExampleError(f"{self.page}: {line}: status {done.returncode}: {done.stderr}")
        why = done.stderr if done.returncode else ""  # the line of a gate that failed
        return f"{line}\n{done.stdout}{why}"
