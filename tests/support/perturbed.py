"""Products as another processor might round them: every matrix product of some modules, moved by its rounding bound."""

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np

CALLED = "_perturbed_product"


class _Products(ast.NodeTransformer):
    """a @ b becomes a call."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        call = ast.Call(ast.Name(CALLED, ast.Load()), [node.left, node.right], [])
        return ast.copy_location(call, node)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """All code objects within one, itself among them."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines."""
    holders: list[Any] = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for holder in holders:
        if holder is not module and holder.__module__ != module.__name__:
            continue
        for each in vars(holder).values():
            found = getattr(each, "__func__", getattr(each, "func", getattr(each, "fget", each)))
            found = inspect.unwrap(found) if callable(found) else found
            if isinstance(found, FunctionType) and found.__module__ == module.__name__:
                yield found


def _moved(result: Any, size: Any, length: int, salt: int, *of: Any) -> Any:
    """A product moved by up to sqrt(length) units of its own precision times `size`; the same for the same arrays."""
    if not isinstance(result, np.ndarray | np.floating) or result.dtype.kind != "f":
        return result
    seed = salt
    for each in of:
        seed = crc32(np.ascontiguousarray(each).view(np.uint8).ravel(), seed) if np.size(each) else seed
    unit = np.sqrt(max(1, length)) * np.finfo(result.dtype).eps / 2
    noise = np.random.default_rng(seed).uniform(-unit, unit, np.shape(result))
    return np.asarray(result + noise * size).astype(result.dtype)[()]


@contextmanager
def perturbed_products(rooms: tuple[str, ...], salt: int) -> Iterator[None]:
    """Within the block every `@` and `einsum` of these rooms of weightscope is off by what rounding may make of it."""
    einsum, changed = np.einsum, list[tuple[FunctionType, CodeType]]()

    def product(a: Any, b: Any) -> Any:
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            return a @ b
        with np.errstate(all="ignore"):
            return _moved(a @ b, np.abs(a) @ np.abs(b), a.shape[-1], salt, a, b)

    def summed(how: str, *of: Any, **options: Any) -> Any:
        result = einsum(how, *of, **options)
        entries, _, kept = how.replace("...", "").partition("->")
        sizes = {letter: n for part, each in zip(entries.split(","), of, strict=True)
                 for letter, n in zip(part, np.shape(each)[-len(part):] if part else (), strict=True)}  # fmt: skip
        length = int(np.prod([n for letter, n in sizes.items() if letter not in kept], initial=1))
        size = einsum(how, *map(np.abs, of), **options)
        return _moved(result, size, length, salt, *of)

    within = tuple(f"weightscope.{room}" for room in rooms)
    modules = [module for name, module in sys.modules.items() if name.startswith("weightscope.")]
    for module in modules:
        source = Path(module.__file__ or "").read_text()
        if not module.__name__.startswith(within) or " @ " not in source:
            continue
        tree = ast.fix_missing_locations(_Products().visit(ast.parse(source)))
        code_of = {each.co_qualname: each for each in _codes(compile(tree, module.__file__ or "", "exec"))}
        vars(module)[CALLED] = product
        for function in _functions(module):
            code = code_of.get(function.__code__.co_qualname)
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                changed.append((function, function.__code__))
                function.__code__ = code
    np.einsum = summed
    try:
        yield
    finally:
        np.einsum = einsum
        for function, code in changed:
            function.__code__ = code
