"""Classes that hold arrays: compared without an error, keys of a dict, and shown in one short line."""

import ast
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from weightscope.heads.detok.first_layer import Parts
from weightscope.model.metrics.spaces import Nearest

ROOT = Path(ws.__file__).parent
ARRAYS = {"ndarray", "NDArray", "Int64s", "Half", "Weights"}


def holds_arrays(annotation: ast.AST) -> bool:
    """An array, or a container of them; a function of arrays holds none."""
    name = getattr(annotation, "attr", getattr(annotation, "id", None))
    function = isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Callable"
    return not function and (name in ARRAYS or any(map(holds_arrays, ast.iter_child_nodes(annotation))))


def classes_of_arrays() -> list[tuple[str, str]]:
    """Module and name of every dataclass with a field that is annotated as arrays."""
    return [
        (".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"), node.name)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(re.search("dataclass|holds_arrays", ast.unparse(each)) for each in node.decorator_list)
        and any(isinstance(field, ast.AnnAssign) and holds_arrays(field.annotation) for field in node.body)
    ]


@pytest.mark.check  # the runner's classes import PyTorch
def test_a_class_that_holds_arrays_is_equal_to_itself_alone_and_shown_in_short() -> None:
    classes = [getattr(importlib.import_module(module), name) for module, name in classes_of_arrays()]
    assert len(classes) > 30
    compared = [
        holder for holder in classes if holder.__eq__ is not object.__eq__ or holder.__hash__ is not object.__hash__
    ]
    assert not compared, "these compare their arrays"
    shown = [holder for holder in classes if holder.__dataclass_params__.repr or holder.__repr__ is object.__repr__]
    assert not shown, "these have no short repr"


def test_six_terms_compare_and_are_shown_by_their_shapes(two_layers: ws.Model) -> None:
    first = ws.first_layer(two_layers)
    terms, same = (first.terms(0, np.array([5, 6, 7]), np.arange(3)) for _ in range(2))
    assert terms == terms and terms != same and len({terms, same}) == 2
    assert repr(terms).startswith("SixTerms(ee=(3, 3), pp=(3, 3), ") and len(repr(terms)) < 200


def test_a_repr_is_short_whatever_the_arrays() -> None:
    assert repr(Nearest(np.zeros((500, 10), int), np.zeros((500, 10)))) == "Nearest(rows=(500, 10), scores=(500, 10))"
    assert repr(Parts(*np.zeros((3, 4, 2)))) == "Parts(e=(4, 2), p=(4, 2), b=(4, 2))"
