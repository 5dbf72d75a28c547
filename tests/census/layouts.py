"""Compare rows with llama.cpp and vLLM, read as text: rotary layout, norms that add 1, scale of scores.

    python -m tests.census.layouts LLAMA_CPP VLLM --out tests/census/layouts.csv

LLAMA_CPP is the folder with `conversion` and `src` (in the source distribution of llama-cpp-python: vendor/llama.cpp),
VLLM the folder of the package in its source distribution. A cell is empty where a project does not know the type, or
where its text does not say it in a way that is read here. `agree` is "no" where two cells of a pair differ.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from tests.census.layout_record import (
    CONFIG,
    HALVES,
    HEAD_DIM,
    NEIGHBOURS,
    NONE,
    OTHER,
    RECORD,
    Line,
    disagreements,
    write,
)
from tests.census.record import read
from weightscope.model.config.rope import Rope
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES, title

ROPE_TYPES = {"NORM": NEIGHBOURS, "NEOX": HALVES, "MROPE": HALVES, "IMROPE": HALVES, "NONE": NONE}
PERMUTED = re.compile(r"(?<!_torch)\.(_?(reverse_hf|un)?_?permute\w*)\(|\b_unpermute_for_rope\(")
CALL_OF_BASE = re.compile(r"\b(super\(\)|\w+)\.modify_tensors\(")
SCALES = {"default_scale": HEAD_DIM, "gpt2_scale": HEAD_DIM, "mpt_scale": HEAD_DIM, "deepseek_scale": HEAD_DIM}
FROM_CONFIG = ("query_scalar", "multiplier", "multiplier_if_any")


# llama.cpp


class LlamaCpp:
    """What its converter and its graphs do, by class of transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.classes: dict[str, ast.ClassDef] = {}
        self.texts: dict[str, str] = {}
        for path in sorted((folder / "conversion").glob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                    self.texts[node.name] = text

    @cached_property
    def registered(self) -> dict[str, str]:
        """The converter's class by the class of transformers."""
        return {
            name.value: converter
            for converter, node in self.classes.items()
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "ModelBase.register"
            for name in decorator.args
            if isinstance(name, ast.Constant) and self.architecture(converter) not in ("", "MMPROJ")
        }

    @cached_property
    def rope_types(self) -> dict[str, str]:
        """NORM, NEOX ... by architecture; of those that ask the file, what text has."""
        source = (self.folder / "src" / "llama-model.cpp").read_text(encoding="utf-8")
        body = source[source.index("llama_rope_type llama_model_rope_type(") :]
        types, waiting = dict[str, str](), list[str]()
        for line in body[: body.index("\n}")].split("\n"):
            waiting += re.findall(r"case LLM_ARCH_(\w+):", line)
            if rope_types := re.findall(r"LLAMA_ROPE_TYPE_(\w+)", line):
                types |= dict.fromkeys(waiting, rope_types[-1])
                waiting = []
        return types

    def lineage(self, converter: str) -> Iterator[ast.ClassDef]:
        """A class of the converter and its bases, nearest first."""
        node = self.classes.get(converter)
        if node is not None:
            yield node
            for base in node.bases:
                yield from self.lineage(ast.unparse(base).rpartition(".")[2])

    def architecture(self, converter: str) -> str:
        return self._attribute(converter, "model_arch").rpartition(".")[2]

    def _attribute(self, converter: str, name: str) -> str:
        """What the nearest class sets an attribute to."""
        for node in self.lineage(converter):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name:
                    return ast.unparse(line.value)
                if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == name and line.value:
                    return ast.unparse(line.value)
        return ""

    def changes(self, converter: str) -> str:
        """The text of what is done to tensors, bases' as far as they are called."""
        text, following, has_shift = "", True, False
        for node in self.lineage(converter):
            for line in node.body:
                if isinstance(line, ast.FunctionDef) and line.name == "norm_shift" and not has_shift:
                    text, has_shift = text + ast.unparse(line), True
                if isinstance(line, ast.FunctionDef) and line.name == "modify_tensors" and following:
                    text += (source := ast.unparse(line))
                    called = {match[1] for match in CALL_OF_BASE.finditer(source)}
                    text += "".join(self.changes(name) for name in called if name in self.classes)
                    following = "super()" in called
        return text

    def rotary(self, converter: str) -> str:
        """The layout of a checkpoint of transformers: ggml's, unless rows are put in another order."""
        kind = ROPE_TYPES.get(self.rope_types.get(self.architecture(converter), ""), "")
        if "self.impl" in "".join(ast.unparse(node) for node in self.lineage(converter)):
            return ""
        permuted = PERMUTED.search(self.changes(converter)) and self._attribute(converter, "undo_permute") != "False"
        return HALVES if kind == NEIGHBOURS and permuted else kind

    def norm_adds(self, converter: str) -> str:
        """Whether 1 is added to gains, as a file of ggml has them."""
        changes = self.changes(converter)
        shifts = re.search(r"data_torch \+ \w*shift", changes) and re.search(r"return 1(\.0)? if ", changes)
        return "1" if shifts or ("norm" in changes and re.search(r"data_torch (\+=?) 1(\.0)?$", changes, re.M)) else "0"

    def scale(self, converter: str) -> str:
        """What multiplies scores in the graph of an architecture, where one line says it."""
        path = self.folder / "src" / "models" / f"{self.architecture(converter).lower().replace('_', '-')}.cpp"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if re.search(r"f_attention_scale == 0\.0f|f_attention_scale != 0\.0f", text):
            return f"{CONFIG} or {HEAD_DIM}"
        if re.search(r"1\.0f ?/ ?sqrtf\((float\()?n_embd_head(_k)?\b", text):
            return HEAD_DIM
        return ""


# vLLM

ROWS_MOVED = "self.permute_qk_weight_for_rotary("  # neighbours become halves as weights are read


class Vllm:
    """What its modules of models say, by class of transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        registry = (folder / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
        self.modules = dict(re.findall(r'"(\w+)": \(\s*"([\w.]+)",', registry))

    def texts(self, module: str) -> list[str]:
        """The source of a module, or of a package's modules."""
        if not module:
            return []
        inner = module.removeprefix("vllm.").replace(".", "/") if "." in module else f"model_executor/models/{module}"
        path = self.folder / inner
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        return [file.read_text(encoding="utf-8") for file in files if file.is_file()]

    def rotary(self, name: str) -> str:
        """The layout where every call of get_rope in the module has the same; of language models alone."""
        if not name.endswith("ForCausalLM"):
            return ""  # its module turns an image's patches too
        styles = set[bool]()
        for text in self._with(name, "get_rope("):
            tree = ast.parse(text)
            for call in ast.walk(tree):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "get_rope":
                    style = next((key.value for key in call.keywords if key.arg == "is_neox_style"), ast.Constant(True))
                    if isinstance(style, ast.Name):
                        style = _first_value(tree, style.id) or style
                    if isinstance(style, ast.Constant) and isinstance(style.value, bool):
                        styles.add(style.value and ROWS_MOVED not in text)
        return {frozenset({True}): HALVES, frozenset({False}): NEIGHBOURS}.get(frozenset(styles), "")

    def norm_adds(self, name: str) -> str:
        texts = self._with(name, "self.input_layernorm = ")
        kinds = {kind for text in texts for kind in re.findall(r"self\.input_layernorm = (\w+)\(", text)}
        aliases = {new: old for text in texts for old, new in re.findall(r"(\w+) as (\w*Norm\w*)", text)}
        adds = {_norm_adds(aliases.get(kind, kind)) for kind in kinds}
        return adds.pop() if len(adds) == 1 else ""

    def _with(self, name: str, words: str) -> list[str]:
        """The module of a class, or the one next to it from which it takes what has these words."""
        texts = self.texts(self.modules.get(name, ""))
        if any(words in text for text in texts):
            return texts
        for module in (module for text in texts for module in re.findall(r"^from \.(\w+) import", text, re.M)):
            if module not in ("utils", "interfaces") and any(words in text for text in self.texts(module)):
                return self.texts(module)
        return []


def _norm_adds(kind: str) -> str:
    """What a class of norm adds to its weights, where its name says it."""
    return "1" if "Gemma" in kind or "1P" in kind else "0" if kind in ("RMSNorm", "LayerNorm") else ""


def _first_value(tree: ast.AST, name: str) -> ast.expr | None:
    """What a name is first set to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    return None


# Rows


def rotary(row: Family) -> str:
    if not isinstance(row.rope, Rope):
        return "" if row.rope else NONE
    if row.rope.interleaved_key:
        return ""  # the config says it
    return NEIGHBOURS if row.rope.interleaved else HALVES


def scale(row: Family) -> str:
    name = row.scores.scale.__name__
    return SCALES.get(name, CONFIG if name in FROM_CONFIG else OTHER)


def compared(llama_cpp: LlamaCpp, vllm: Vllm) -> Iterator[Line]:
    """One line for each type that is exact here and that another of the projects knows."""
    from transformers.models.auto import modeling_auto as auto

    of_type = {
        kind: names if isinstance(names, str) else names[0]
        for mapping in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        for kind, names in mapping.items()
    } | {
        "bert": "BertModel",
        "nomic_bert": "NomicBertModel",
        "modernbert": "ModernBertModel",
        "eurobert": "EuroBertModel",
    }
    rows = {title(row): row for row in FAMILIES}
    seen = dict[str, str]()
    for each in read():
        if (
            each.verdict == "exact"
            and each.kind != "cross"
            and each.row in rows
            and not rows[each.row].tower.startswith("vis")
        ):
            seen.setdefault(each.type, each.row)
    for kind, name in seen.items():
        row, called = rows[name], of_type.get(kind, "")
        converter = llama_cpp.registered.get(called, "")
        theirs = vllm.rotary(called), vllm.norm_adds(called)
        if not converter and not any(theirs):
            continue
        norm = row.norms.before
        ours = rotary(row), "" if norm is None else str(int(bool(norm.offset))), scale(row)
        llama = ("", "", "") if not converter else (
            llama_cpp.rotary(converter), llama_cpp.norm_adds(converter), llama_cpp.scale(converter)
        )  # fmt: skip
        scales = ours[2], llama[2]
        if llama[2].startswith(CONFIG) and ours[2] in (CONFIG, HEAD_DIM):
            scales = ours[2], ours[2]  # where the config says it, the file does
        line = Line(kind, name, ours[0], llama[0], theirs[0], ours[1], llama[1], theirs[1], *scales)
        yield Line(**{**vars(line), "agree": "no" if disagreements(line) else "yes"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.census.layouts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    lines = sorted(compared(LlamaCpp(options.llama_cpp), Vllm(options.vllm)), key=lambda line: line.type)
    write(lines, options.out)
    print(f"{len(lines)} types, {sum(line.agree == 'no' for line in lines)} of them otherwise in one of the projects")
