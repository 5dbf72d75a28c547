"""Run the examples of a page when the site is built, and put their output below them.

A block of code whose first line ends in `run` is run; with `quiet` it is run and not shown. Python
blocks of a page share one namespace. Lines of a console block that begin with `$` are commands.
`{{ expression }}` in the text becomes the expression's value in that namespace, `{{ expression :.3f
}}` its value in that format. A page runs in one folder, which is empty at first. If an example
fails, the build fails.
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

BLOCK = re.compile(
    r"^```(?P<language>python|console) (?P<how>run|quiet)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
VALUE = re.compile(r"\{\{ (?P<expression>.+?)(?: :(?P<format>[^\s}]+))? ?\}\}")
LONGEST = 120  # seconds


class ExampleError(Exception):
    """An example of a page failed."""


class Examples:
    """The examples of one page.

    Parameters
    ----------
    page : str
        Its name, for error messages.
    folder : Path
        Working directory of the examples.
    names : dict
        Names that expressions may use.
    """

    def __init__(self, page: str, folder: Path, names: dict[str, Any]) -> None:
        self.page, self.folder, self.names = page, folder, dict(names)

    def fill(self, text: str) -> str:
        """The page's text with the output of its examples and the values of its expressions."""
        return walked(text, BLOCK, lambda block: self._shown(**block.groupdict()), self._values)

    def _values(self, text: str) -> str:
        return outside_code(text, lambda part: VALUE.sub(self._value, part))

    def _value(self, match: re.Match[str]) -> str:
        try:
            return format(eval(match["expression"], self.names), match["format"] or "")
        except Exception as error:
            raise ExampleError(f"{self.page}: {match[0]}: {error!r}") from error

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
        """A console line with its output if it is a command; other lines are dropped."""
        if not line.startswith("$ "):
            return ""
        program, *arguments = shlex.split(line[2:], comments=True)
        assert program == "weightscope", f"{self.page} runs {program}; only weightscope may run"
        command = [sys.executable, "-m", program, *arguments]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LONGEST}
        done = subprocess.run(command, cwd=self.folder, **options)
        if done.returncode:
            raise ExampleError(f"{self.page}: {line}: status {done.returncode}: {done.stderr}")
        return f"{line}\n{done.stdout}"
