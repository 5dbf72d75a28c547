"""Plant faults in one layer after the other of a checkpoint, and in all, and count which of them an audit finds.

python -m analyses.experiments.planted_faults SOURCE... [--out out/planted-faults]
"""

from analyses.study import judge_each, sources_argument, study, titled, write
from tests.support.plants.faults import COLUMNS, judged, plants_of
from weightscope.core.files import Folder


@study("planted-faults")
@sources_argument
def main(files: Folder, sources: tuple[str, ...]) -> None:
    """Write a table for every SOURCE: for each fault, in how many layers it was planted and found."""
    for source, title in titled(sources):
        write(files, title, COLUMNS, judge_each(plants_of(source), judged, title))


if __name__ == "__main__":
    main()
