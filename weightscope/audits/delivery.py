"""The task that ends a checkpoint's audit, wherever it runs: findings, tables, figures and page, as bytes."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from weightscope.audits.audit import AuditOptions, Measured, conclude, write_audit
from weightscope.audits.many import Delivery, headline
from weightscope.audits.report import summary, write_report
from weightscope.model import Model

_drawing = Lock()  # matplotlib draws one thing at a time; a worker may have several threads


def deliver(opened: Callable[[], Model], heads: Measured, options: AuditOptions, out: Path) -> Delivery:
    """Conclude an audit and make its files.

    Parameters
    ----------
    opened : function returning the model
    heads : Measured
    options : AuditOptions
    out : Path
        Where the files will lie in the end; named, not written to.
    """
    model = opened()
    results = conclude(model, heads, options)
    with TemporaryDirectory(prefix="weightscope-") as temporary, _drawing:
        folder = Path(temporary)
        write_audit(results, folder)
        write_report(model, results, folder)
        made = sorted(folder.iterdir(), key=lambda path: (path.suffix == ".html", path.name))  # the page last
        files = {path.name: path.read_bytes() for path in made}
    caveats = [f"not in these numbers: {caveat}" for caveat in heads.caveats]
    return Delivery(files, [*summary(model, results, out), *caveats], headline(model, results))
