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
from weightscope.model.config.dialects import FULL, SLIDING
from weightscope.model.config.readers import (
    ACTIVATIONS,
    ALL,
    BY_TYPE,
    FILE,
    FIVE,
    FOUR,
    LLAMA_CPP,
    TAKEN,
    VLLM,
    What,
)
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
# How modeling code of transformers makes a mask with a window.
MASK = "create_sliding_window_causal_mask"
OF_ALL = re.compile(r"if self\.config\.sliding_window is None else create_sliding_window_causal_mask")
# How a graph of llama.cpp takes the layers with a window from a file: in its period, if the file has none.
PERIOD = re.compile(r"load_swa_pattern\(ml, (\d+)(, (?:/\*dense_first=\*/)?true)?\)")
FROM_FILE = re.compile(r"get_arr\(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN, hparams\.is_swa_impl\)")
WRITES = "add_sliding_window_pattern("
OF_TYPES = re.compile(
    r"add_sliding_window_pattern\(.*layer_types|sliding_window_pattern = \[.*layer_types|append\(t == 'sl"
)
GRAPHS = {"gpt-oss": "openai-moe"}  # of another name than their architecture
# How vLLM's code gives layers a window, and an activation by a key.
OF_LAYER = "per_layer_sliding_window="
OF_PERIOD = re.compile(r"sliding_window if self\.layer_idx % (2) == 0")
FUNCTION = re.compile(r"get_act(?:_and_mul)?_fn\(\s*(?:hidden_act=)?(?:self\.)?config\.(\w+)")
PASSED = re.compile(r"\b(?:hidden_act|hidden_activation|act|activation)=(?:self\.)?config\.(\w+)")
ONLY_SILU = re.compile(r"hidden_act\w* != \"silu\":\s+raise ValueError")


def of_transformers() -> dict[str, Any]:
    """The section of the installed version."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables: dict[str, dict[str, dict[str, list[str]]]] = {
        title: defaultdict(lambda: defaultdict(list)) for title in ("values", "names")
    }
    reads: dict[str, list[str]] = defaultdict(list)
    windows: dict[str, list[str]] = defaultdict(list)
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
            if how := windows_of(make, usual):
                windows[how].append(kind)
    joined = {
        title: {
            key: {value: " ".join(kinds) for value, kinds in sorted(these.items())}
            for key, these in sorted(table.items())
        }
        for title, table in tables.items()
    }
    more = joined if transformers_4() else {"wrappers": wrappers()}  # config_defaults.json has the values of 5
    lists = {"reads": reads, "windows": windows}
    return {
        **more,
        **{title: {key: " ".join(kinds) for key, kinds in sorted(these.items())} for title, these in lists.items()},
    }


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
    texts = (file.read_text(encoding="utf-8") for file in modeling_files(make))
    return {next(filter(None, match.groups())) for text in texts for match in IN_CODE.finditer(text)}


def modeling_files(make: Any) -> list[Path]:
    """The modules of a config's models."""
    others = ("modeling_flax", "modeling_tf")
    files = Path(inspect.getfile(make)).parent.glob("modeling_*.py")
    return [file for file in files if not file.name.startswith(others)]


def windows_of(make: Any, usual: Any) -> str:
    """How the code of a config's models chooses layers with a window; empty where its text does not say it."""
    texts = [path.read_text(encoding="utf-8") for path in modeling_files(make)]
    if not any(MASK in text for text in texts) or not hasattr(usual, "sliding_window"):
        return ""
    types = getattr(usual, "layer_types", None)
    if any(map(OF_ALL.search, texts)):
        return ALL if types is None else ""
    is_plain = types is not None and {*types} <= {FULL, SLIDING, "linear_attention"}
    return BY_TYPE if is_plain and make(sliding_window=37).sliding_window in (37, None) else ""


def of_llama_cpp(folder: Path) -> dict[str, Any]:
    """Classes that its converter reads, those whose window it writes, and those with rules of their own."""
    project = LlamaCpp(folder)
    own: dict[str, list[str]] = defaultdict(list)
    windows = []
    layers: dict[str, list[str]] = defaultdict(list)
    for name, converter in sorted(project.registered.items()):
        lineage = [node for node in project.lineage(converter) if node.name not in ("TextModel", "ModelBase")]
        text = "\n".join(map(ast.unparse, lineage))
        if WINDOW.search(text):
            windows.append(name)
            called = project.architecture(converter).lower().replace("_", "-")
            graph = folder / "src" / "models" / f"{GRAPHS.get(called, called)}.cpp"
            if how := layers_of(text, graph.read_text(encoding="utf-8") if graph.is_file() else ""):
                layers[how].append(name)
        for what, (writes, usual) in OWN.items():
            if any(re.search(writes, line) and not re.search(usual, line) for line in text.split("\n")):
                own[what].append(name)
    return {
        "classes": " ".join(sorted(project.registered)),
        "windows": " ".join(windows),
        "layers": {how: " ".join(names) for how, names in sorted(layers.items())},
        "own": {what: " ".join(names) for what, names in own.items()},
    }


def layers_of(converter: str, graph: str) -> str:
    """How llama.cpp chooses layers with a window: by what is written of types, or in its graph's period."""
    period = PERIOD.search(graph)
    if WRITES in converter:
        return BY_TYPE if OF_TYPES.search(converter) and (period or FROM_FILE.search(graph)) else ""
    return f"{period[1]} {'first' if period[2] else 'last'}" if period else ""


def of_vllm(folder: Path) -> dict[str, Any]:
    """Classes that it has code for, and those whose code has one activation."""
    project = Vllm(folder)
    names = sorted(project.modules)
    silu = [name for name in names if any(map(ONLY_SILU.search, project._with(name, '!= "silu"')))]
    layers: dict[str, list[str]] = defaultdict(list)
    activations: dict[str, list[str]] = defaultdict(list)
    for name in names:
        text = "\n".join(project._with(name, OF_LAYER))
        if period := OF_PERIOD.search(text):
            layers[f"{period[1]} last"].append(name)
        elif (OF_LAYER in text and "layer_types" in text) or project.modules[name] == "transformers":
            layers[BY_TYPE].append(name)
        calls = "\n".join(project._with(name, "_fn("))
        keys = {*FUNCTION.findall(calls), *PASSED.findall(calls)} & {*ACTIVATIONS}
        is_language = name.endswith(("ForCausalLM", "LMHeadModel")) and "vision" not in calls.lower()
        either = "hidden_activation" in calls and "hidden_act" in calls.replace("hidden_activation", "")  # Gemma's
        if is_language and not either and name not in silu and len(keys) == 1:
            activations[keys.pop()].append(name)
    lists = {"layers": layers, "activations": activations}
    return {
        "classes": " ".join(names),
        "silu": " ".join(silu),
        **{title: {key: " ".join(these) for key, these in sorted(table.items())} for title, table in lists.items()},
    }


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
