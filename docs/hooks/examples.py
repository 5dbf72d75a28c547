"""Examples of a page are run when the site is built, and what they print stands below them.

A block of code whose first line ends in `run` is run (in `quiet`: and not shown): Python in one namespace a page, a
console's lines that begin with `$` as commands. `{{ expression }}` in the text is the expression's value in that
namespace, `{{ expression :.3f }}` its value in that format. All of a page runs in one folder, empty at first. An
example that fails, fails the build.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from links import outside_code, walked

BLOCK = re.compile(r"^```(?P<language>python|console) (?P<how>run|quiet)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
VALUE = re.compile(r"\{\{ (?P<expression>.+?)(?: :(?P<format>[^\s}]+))? ?\}\}")
LONGEST = 120  # seconds


class ExampleError(Exception):
    """An example of a page did not run."""


class Examples:
    """The examples of one page.

    Parameters
    ----------
    page : str
        Its name, for the message of one that fails.
    folder : Path
        Where they run.
    names : dict
        What its expressions may use.
    """

    def __init__(self, page: str, folder: Path, names: dict[str, Any]) -> None:
        self.page, self.folder, self.names = page, folder, dict(names)

    def fill(self, text: str) -> str:
        """The page's text with what its examples print and what its expressions are."""
        return walked(text, BLOCK, lambda block: self._shown(**block.groupdict()), self._values)

    def _values(self, text: str) -> str:
        return outside_code(text, lambda part: VALUE.sub(self._value, part))

    def _value(self, found: re.Match[str]) -> str:
        try:
            return format(eval(found["expression"], self.names), found["format"] or "")
        except Exception as error:
            raise ExampleError(f"{self.page}: {found[0]}: {error!r}") from error

    def _shown(self, language: str, how: str, code: str) -> str:
        if language == "console":
            return f"```console\n{''.join(map(self._command, code.splitlines()))}```"
        printed = self._python(code)
        if how == "quiet":
            return ""
        return f"```python\n{code}```\n" + (f"\n```text\n{printed}```" if printed else "")

    def _python(self, code: str) -> str:
        printed = io.StringIO()
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
                exec(compile(code, self.page, "exec"), self.names)
        except Exception as error:
            raise ExampleError(f"{self.page}: {code}{error!r}") from error
        return printed.getvalue()

    def _command(self, line: str) -> str:
        """A line of a console: a command with what it prints, or a line that only shows what a reader may type."""
        if not line.startswith("$ "):
            return ""
        program, *arguments = shlex.split(line[2:], comments=True)
        assert program == "weightscope", f"{self.page} runs {program}; only weightscope is run"
        done = subprocess.run(
            [sys.executable, "-m", program, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        if done.returncode:
            raise ExampleError(f"{self.page}: {line}: status {done.returncode}: {done.stderr}")
        return f"{line}\n{done.stdout}"
