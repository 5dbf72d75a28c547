"""`weightscope audit LIST.txt`: a folder of results a checkpoint, and a summary that grows as they end."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weightscope.audits.audit import AuditOptions
from weightscope.audits.delivery import deliver
from weightscope.audits.many import Commission, audit_all
from weightscope.audits.summary import Row, read_summary, row_of, write_summary
from weightscope.audits.summary_page import write_summary_page
from weightscope.engine import Engine
from weightscope.folder import OutputFolder
from weightscope.sources import Source, folder_names


def audit_list(
    sources: Sequence[Source],
    out: Path,
    options: AuditOptions,
    engine: Engine,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:
    """Audit every source into OUT/NAME, and say of each how it went as soon as it has ended.

    summary.csv has a row for each that has ended, in the order of the sources; summary.html is written at the end.

    Raises
    ------
    CheckpointError
        Two sources would share a folder, `out` cannot be written to or another audit is at work there, or the engine
        failed.
    """
    names = folder_names([source.source for source in sources])
    commissions = [Commission(source, out / name) for source, name in zip(sources, names, strict=True)]
    with OutputFolder(out) as folder:
        earlier = read_summary(out) if resume else {}
        rows: dict[str, Row] = {}

        def done(commission: Commission, plan: str) -> bool:
            row = earlier.get(commission.out.name)
            return row is not None and row.plan == plan

        def say_of(commission: Commission, line: str) -> None:
            say(f"{commission.out.name}: {line}")

        for ended in audit_all(commissions, options, engine, deliver, resume, done, say_of):
            name, source = ended.commission.out.name, ended.commission.source.source
            was_done = ended.delivery is None and ended.error is None
            rows[name] = earlier[name] if was_done else row_of(name, source, ended)
            write_summary([rows[name] for name in names if name in rows], folder)
            yield rows[name]
        write_summary_page([rows[name] for name in names], folder)
