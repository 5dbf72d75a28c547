"""Bugs of converters and exporters that were reported in public, done again to tiny models, and what `same` says.

    python -m analyses.experiments.public_bugs [--versions] --out out/bugs

With --versions, the tools themselves run too where PyPI has a version before and one after the fix, each on a tiny
model of random weights. bugs.csv has one row per bug that is re-enacted, and two per tool that runs.
"""

import click

from analyses.study import judge_each, study, write
from tests.support.plants.bug_versions import RELEASES
from tests.support.plants.bugs import BUGS, COLUMNS, before_and_after, enacted, judged
from weightscope.core.errors import CheckpointError
from weightscope.core.files import Folder, scratch_folder


@study("bugs")
@click.option("--versions", is_flag=True, help="Run the tools' own versions too, installed by pip.")
def main(files: Folder, versions: bool) -> None:
    """Do all of them, and write bugs.csv."""
    rows = judge_each(map(enacted, BUGS), judged, "bugs")
    for release in RELEASES if versions else ():
        try:
            with scratch_folder() as folder:
                rows += judge_each(before_and_after(release, folder), judged, release.tool)
        except CheckpointError as error:
            click.echo(f"left out: {error}")
    write(files, "bugs", COLUMNS, rows, echo=True)


if __name__ == "__main__":
    main()
