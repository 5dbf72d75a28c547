"""How results show themselves in a notebook: a sentence, a picture where it says more, and tables."""

from base64 import b64encode
from typing import Any

from markupsafe import Markup

from weightscope.tables import templates


def notebook(lead: str, *tables: Any, picture: bytes = b"") -> str:
    """A result as HTML.

    Parameters
    ----------
    lead : str
        What it says, in a sentence.
    *tables : Table, Findings
        Whatever shows itself in a notebook.
    picture : bytes, optional
        A PNG, kept inside.
    """
    shown = [Markup(table._repr_html_()) for table in tables]
    return (
        templates().get_template("notebook.html").render(lead=lead, tables=shown, picture=b64encode(picture).decode())
    )
