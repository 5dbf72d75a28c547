"""Rows of architectures whose code is not part of transformers."""

import tomllib
from importlib.resources import files

from weightscope.model.rows.family import Family

REMOTE = {"llada", *tomllib.loads(files("weightscope.model.rows").joinpath("remote.toml").read_text())}


def is_remote(row: Family) -> bool:
    return row.name.split(".")[0] in REMOTE
