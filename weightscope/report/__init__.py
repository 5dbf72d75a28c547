"""Pages, findings and results read back: what a result shows, without a question of its own.

Read `findings` (the kinds of findings), `pages` (templates, style, tables), then `written` (results
from a folder).
"""
