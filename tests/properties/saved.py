"""Cases that once failed, as the sweep prints them."""

from tests.properties.cases import BROKEN, Case
from tests.properties.originals import Writing

SAVED = (
    Case(  # names that no row knows: `learned` said that nothing was trained
        "wide/mpnet", BROKEN, "one added", ("encoder.layer.0.intermediate.dense.bias",), writing=Writing(prefix="x.x.")
    ),
)
