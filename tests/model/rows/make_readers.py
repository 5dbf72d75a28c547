"""Write what other readers of config.json take: weightscope/model/config/readers.json.

    python -m tests.model.rows.make_readers               # under transformers 4.57, then under 5
    python -m tests.model.rows.make_readers --llama-cpp LLAMA_CPP --vllm VLLM

The first run, under each version, writes that version's section: the defaults of the keys that readers may take
otherwise, other names of these keys, and which of them the code of a model_type's models reads. No PyTorch is needed:
code is read as text. The second writes the sections of llama.cpp and vLLM, from their text: the classes that they have
code for, and those with rules of their own. LLAMA_CPP is the folder with `conversion` (vendor/llama.cpp in the source
distribution of llama-cpp-python), VLLM the folder of the package in its source distribution.
"""

import argparse
import ast
import inspect
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.census.layouts import LlamaCpp, Vllm
from weightscope.model.config.config import KEYS
from weightscope.model.config.readers import ACTIVATIONS, FILE, FIVE, FOUR, LLAMA_CPP, TAKEN, VLLM, What
from weightscope.model.rows.table import FAMILIES

PROBES = {str: "gelu_10", bool: None, int: 37, float: 37.0, dict: {"rope_type": "linear", "factor": 37.0}}
IN_CODE = re.compile(r"\bconfig\.(\w+)|getattr\((?:self\.)?config, \"(\w+)\"")
# What a converter may write by rules of its own, and the lines that write what all classes take.
OWN = {
    What.BASE: (r"add_rope_freq_base\(|self\.hparams\['rope_theta'\] = ", r"\(self\.rope_parameters[.\[]"),
    What.HEAD: (r"add_key_length\(|hparams\.pop\('head_dim'", r"hparams(\.get\(|\[)'head_dim'"),
    What.EPS: (
        r"add_layer_norm(_rms)?_eps\(",
        r"hparams(\.get\(|\[)'(rms_norm_eps|norm_eps|layer_norm_epsilon|layer_norm_eps)'",
    ),
}
WINDOW = re.compile(r"add_sliding_window\(")
ONLY_SILU = re.compile(r"hidden_act\w* != \"silu\":\s+raise ValueError")


def of_transformers() -> dict[str, Any]:
    """The section of the installed version."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables: dict[str, dict[str, dict[str, list[str]]]] = {
        title: defaultdict(lambda: defaultdict(list)) for title in ("values", "names")
    }
    reads: dict[str, list[str]] = defaultdict(list)
    for kind in sorted({kind for row in FAMILIES for kind in row.types} & {*CONFIG_MAPPING}):
        make = CONFIG_MAPPING[kind]
        with suppress(Exception):
            usual = make()
            for key in TAKEN:
                if hasattr(usual, key):
                    value = None if key == "head_dim" and follows_width(make, usual) else getattr(usual, key)
                    tables["values"][key][json.dumps(value)].append(kind)
            for key, stored in other_names(make, usual).items():
                tables["names"][key][stored].append(kind)
            for key in {"head_dim", *ACTIVATIONS} & read_by(make):
                reads[key].append(kind)
    joined = {
        title: {
            key: {value: " ".join(kinds) for value, kinds in sorted(these.items())}
            for key, these in sorted(table.items())
        }
        for title, table in tables.items()
    }
    more = joined if transformers_4() else {"wrappers": wrappers()}  # config_defaults.json has the values of 5
    return {**more, "reads": {key: " ".join(kinds) for key, kinds in sorted(reads.items())}}


def wrappers() -> dict[str, str]:
    """Wrappers that tie embeddings where a file says nothing, and those that take it from their text's config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, list[str]] = {"tied": [], "of their text": []}
    for kind in sorted(CONFIG_MAPPING):
        with suppress(Exception):
            usual = CONFIG_MAPPING[kind]()
            text = usual.get_text_config(decoder=True)
            if text is usual or not hasattr(usual, "text_config"):
                continue
            inner = {"model_type": text.model_type, "tie_word_embeddings": True}
            untied = CONFIG_MAPPING[kind](text_config={**inner, "tie_word_embeddings": False})
            tied = CONFIG_MAPPING[kind](text_config=inner)
            if untied.tie_word_embeddings:
                found["tied"].append(kind)
            elif tied.tie_word_embeddings:
                found["of their text"].append(kind)
    return {title: " ".join(kinds) for title, kinds in found.items()}


def transformers_4() -> bool:
    """Whether the installed version is 4.57."""
    import transformers

    return transformers.__version__.startswith("4.57.")


def follows_width(make: Any, usual: Any) -> bool:
    """Whether the size of a head that a class has follows from its other sizes."""
    for key in KEYS["d_model"]:
        if type(getattr(usual, key, None)) is int:
            with suppress(Exception):
                if make(**{key: 2 * getattr(usual, key)}).head_dim != usual.head_dim:
                    return True
    return False


def other_names(make: Any, usual: Any) -> dict[str, str]:
    """Keys that a class stores under other keys."""
    found: dict[str, str] = {}
    for key in TAKEN:
        for probe in PROBES.values():
            with suppress(Exception):
                made = make(**{key: probe})
                changed = [
                    name
                    for name in TAKEN
                    if name != key and getattr(made, name, None) == probe != getattr(usual, name, None)
                ]
                found.update((key, name) for name in changed)
    return found


def read_by(make: Any) -> set[str]:
    """Keys that the code of a config's models reads."""
    others = ("modeling_flax", "modeling_tf")
    files = [
        file for file in Path(inspect.getfile(make)).parent.glob("modeling_*.py") if not file.name.startswith(others)
    ]
    texts = (file.read_text(encoding="utf-8") for file in files)
    return {next(filter(None, match.groups())) for text in texts for match in IN_CODE.finditer(text)}


def of_llama_cpp(folder: Path) -> dict[str, Any]:
    """Classes that its converter reads, those whose window it writes, and those with rules of their own."""
    project = LlamaCpp(folder)
    own: dict[str, list[str]] = defaultdict(list)
    windows = []
    for name, converter in sorted(project.registered.items()):
        lineage = [node for node in project.lineage(converter) if node.name not in ("TextModel", "ModelBase")]
        text = "\n".join(map(ast.unparse, lineage))
        if WINDOW.search(text):
            windows.append(name)
        for what, (writes, usual) in OWN.items():
            if any(re.search(writes, line) and not re.search(usual, line) for line in text.split("\n")):
                own[what].append(name)
    return {
        "classes": " ".join(sorted(project.registered)),
        "windows": " ".join(windows),
        "own": {what: " ".join(names) for what, names in own.items()},
    }


def of_vllm(folder: Path) -> dict[str, Any]:
    """Classes that it has code for, and those whose code has one activation."""
    project = Vllm(folder)
    silu = [name for name in sorted(project.modules) if any(map(ONLY_SILU.search, project._with(name, '!= "silu"')))]
    return {"classes": " ".join(sorted(project.modules)), "silu": " ".join(silu)}


def add(sections: Mapping[str, Any]) -> None:
    """Write sections of the file anew, and leave the others."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    text = json.dumps({**kept, **sections}, indent=0, sort_keys=True)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.model.rows.make_readers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--vllm", type=Path)
    options = parser.parse_args()
    if options.llama_cpp and options.vllm:
        add({LLAMA_CPP: of_llama_cpp(options.llama_cpp), VLLM: of_vllm(options.vllm)})
    else:
        import transformers

        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        add({FOUR if transformers_4() else FIVE: of_transformers()})
