"""The notebooks, run from the checkout.

python -m tests.support.notebooks        # runs them and writes what they show; of one, its name
"""

import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"


def is_progress(output: Any) -> bool:
    """True for bars and for the names of phases, which a slow machine shows."""
    lines = filter(str.strip, re.split(r"[\r\n]", output.get("text", "")))
    return output.get("name") == "stderr" and all(
        re.search(r" \.\.\.$|\d[\d.]*[kM]?/\d|to go$", line) for line in lines
    )


def executed(path: Path, cells: int | None = None) -> Any:
    """A notebook, or its first cells, with its outputs, and nothing that differs from run to run."""
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    notebook.cells = notebook.cells[:cells]
    root = {"metadata": {"path": str(FOLDER.parent)}}  # where `import weightscope` finds this checkout
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc")
    NotebookClient(notebook, kernel, timeout=600, resources=root, record_timing=False).execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_progress(output)]
    return notebook


if __name__ == "__main__":
    import nbformat

    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        nbformat.write(executed(FOLDER / f"{name}.ipynb"), FOLDER / f"{name}.ipynb")
