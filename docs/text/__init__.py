"""Outputs, tables and pictures of README and docs/: `python -m docs.text` writes them.

Pages stay plain Markdown. Python blocks of a page are run in order and share names; what one prints
follows in a block of text. Lines of a console block that begin with `$` are commands, with
their output below. `<!-- not run -->` above a block leaves it alone. A table between `<!-- table:
NAME -->` and `<!-- end -->` comes from the code. A picture `assets/PAGE/FILE` is the FILE that the
page's blocks made.
"""
