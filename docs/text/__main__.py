"""Refresh pages, or all of them: `python -m docs.text docs/tutorial.md`."""

import sys
from pathlib import Path

from docs.text.pages import PAGES, ROOT, ExampleError, refreshed

for page in map(Path.absolute, map(Path, sys.argv[1:])) if sys.argv[1:] else PAGES:
    before = page.read_text(encoding="utf-8")
    try:
        after, pictures = refreshed(page)
    except ExampleError as error:
        sys.exit(str(error))
    for path, content in pictures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if after != before:
        page.write_text(after, encoding="utf-8")
        print("refreshed", page.relative_to(ROOT))
