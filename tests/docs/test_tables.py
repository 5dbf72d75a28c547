"""Tables in docs/ that show counts of a kept file have its rows."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from tests.support.plants.deeds import NOT_SAME, ROUNDING
from tests.support.plants.mixers import counted
from tests.support.quoted import ROOT, rows, said

pytestmark = pytest.mark.docs


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def share(number: str, digits: int = 2) -> str:
    return f"{float(number):.{digits}f}" if number else ""


CONTAINERS = {"F32": "float32", "BF16, two shards": "bfloat16 in two shards"}


def damaged() -> Iterator[str]:
    """Cases of each container whose logits differ, and what `same` said about each."""
    table = rows("planted-deeds/deeds.csv")
    for container in dict.fromkeys(case["container"] for case in table):
        cases = [case for case in table if case["container"] == container]
        differing = [case for case in cases if float(case["logits"]) > ROUNDING]
        verdicts = Counter("different" if case["verdict"] in NOT_SAME else case["verdict"] for case in differing)
        right = (sum(case[name] == "True" for case in differing) for name in ("tensors_right", "named"))
        families = len({case["family"] for case in cases})
        counts = len(differing), verdicts["different"], verdicts["refused"]
        yield row(CONTAINERS.get(container, container), families, *counts, *right)


def mixers() -> Iterator[str]:
    """Layers without a softmax: tensors named, and copies with one of them damaged."""
    for name, kinds, tensors, named, *counts, _ in counted(rows("planted-mixers/mixers.csv")):
        yield row(name, kinds, tensors, named, *counts)


WRITERS = {
    "transformers": "transformers, save and reload", "safetensors": "safetensors, rewritten",
    "llama.cpp convert_hf_to_gguf.py": "llama.cpp's convert_hf_to_gguf.py", "ggml_quantize_chunk": "ggml's quantiser",
    "mlx-lm": "mlx-lm", "peft": "PEFT, merged LoRA", "compressed-tensors": "compressed-tensors",
    "llm-compressor": "llm-compressor, four by GPTQ", "ModelOpt": "ModelOpt", "AutoRound": "AutoRound, one tuned",
    "HQQ": "HQQ",
}  # fmt: skip
SOME_RUN = ("llama.cpp convert_hf_to_gguf.py", "ggml_quantize_chunk", "mlx-lm")  # the others: all, or none


def faithful() -> Iterator[str]:
    for writer, name in WRITERS.items():
        kept = [case for case in rows("faithful/faithful.csv") if case["writer"] == writer]
        total, expected = (sum(int(case[name]) for case in kept) for name in ("conversions", "as_expected"))
        run = sum(int(case["conversions"]) for case in kept if case["witness"] == "outputs")
        ran = run + sum(int(case["conversions"]) for case in kept if case["witness"] == "outputs differ")
        outputs = f"{run} of {ran} run" if writer in SOME_RUN else run or "not run"
        yield row(name, len({case["source"] for case in kept}), total, expected, outputs)


BY_IDENTITY = ("same values", "rounded", "undecided", "different", "refused")


def copies_by_identity() -> Iterator[str]:
    """Faithful conversions by the verdict of both files, and what is said where one is an identity."""
    kept = [case | {"verdict": case["verdict"].replace("bytes", "values")} for case in rows("faithful/faithful.csv")]
    for verdict in dict.fromkeys(case["verdict"] for case in kept):
        counts = Counter[str]()
        for case in kept:
            counts[case["by_identity"]] += int(case["conversions"]) * (case["verdict"] == verdict)
        yield row(verdict, counts.total(), *(counts[each] for each in BY_IDENTITY))


def damaged_by_identity() -> Iterator[str]:
    """Damaged copies whose logits differ, by container, and what is said where the original is an identity."""
    table = [case for case in rows("planted-deeds/deeds.csv") if float(case["logits"]) > ROUNDING]
    for container in dict.fromkeys(case["container"] for case in table):
        cases = [case for case in table if case["container"] == container]
        counts = Counter(case["by_identity"] for case in cases)
        right = sum(case["identity_right"] == "True" for case in cases if case["by_identity"] == "different")
        kinder = counts.total() - sum(counts[each] for each in ("different", "undecided", "refused"))
        shown = (len(cases), counts["different"], right, counts["undecided"], counts["refused"], kinder)
        yield row(CONTAINERS.get(container, container), *shown)


HELD_OUT = ("embedded", "vit-named", "vit-named-registers", "vit-pixels", "vit-pixels-registers")


def faults_held_out() -> Iterator[str]:
    """Layers with a warning for a fault planted in one, in models that no limit of the audit was set on."""
    tables = [rows(f"planted-faults-held-out/{model}.csv") for model in HELD_OUT]
    for same in zip(*tables, strict=True):
        if "in all layers" not in same[0]["fault"] and same[0]["layers"] == same[1]["layers"] == "4":
            yield row(same[0]["fault"], *(case["warned"] for case in same))
    yield row("none: errors and warnings", *(table[0]["false_alarms"] for table in tables))


def link(bug: dict[str, str]) -> str:
    project, _, number = bug["report"].split("/")[-3:]
    return f"[{project} {number}]({bug['report']})"


def verdict(bug: dict[str, str]) -> str:
    return ": ".join(filter(None, (bug["verdict"], bug["deeds"])))


def versions() -> Iterator[str]:
    """The version of a tool before a bug was mended, and the one after it."""
    ran = [bug for bug in rows("same/bugs.csv") if bug["evidence"] == "the tool's own versions"]
    for before, after in pairwise(ran):
        if after["what"] == "mended":
            yield row(link(before), before["tool"], verdict(before), after["tool"].split()[-1], verdict(after))


def reenacted() -> Iterator[str]:
    for bug in rows("same/bugs.csv"):
        if bug["evidence"] == "from the description":
            yield row(link(bug), bug["tool"], bug["what"], verdict(bug))


def attacks() -> Iterator[str]:
    """What was tried on the small Llama; files of a registry cost nothing."""
    for tried in rows("lineage-attacks/attacks.csv"):
        if tried["model"] == "llama-0":
            base = f" to {tried['base']}" if tried["attack"].startswith(("registry", "print")) else ""
            cost = f"{float(tried['kl']):.2g}" if tried["kl"] else "none"
            kept = f"{float(tried['first_kept']):.0%}" if tried["first_kept"] else "all"
            yield row(tried["attack"], tried["strength"], cost, kept, tried["verdict"] + base)


BASES = {"two-layers": "two layers", "llama-0": "llama-0", "smollm2": "SmolLM2, six topics"}


def topics() -> Iterator[str]:
    """The precision of the listed tokens, next to baselines."""
    kept = {(case["model"], case["training"], case["number"]): case["value"] for case in rows("learned/summary.csv")}
    for model, name in BASES.items():
        for training in ("full", "LoRA 8"):
            ranked = ("words", "embedding", "frequent", "writes", "reads")
            cells = (share(kept.get((model, training, f"precision of {each}"), "")) for each in ranked)
            yield row(name, training.removesuffix(" 8"), *cells)


def lost() -> Iterator[str]:
    """How many planted relatives are joined with their base, by the share that is read."""
    table = rows("atlas-losses/losses.csv")
    for base, read in dict.fromkeys((case["base"], case["share_read"]) for case in table):
        ways = Counter(case["joined_by"] for case in table if (case["base"], case["share_read"]) == (base, read))
        counts = f"{ways.total() - ways['']} of {ways.total()}", *(ways[way] for way in ("bits", "heads", "values"))
        yield row("Llama" if base == "llama" else "GPT-2", read, *counts)


def strangers() -> Iterator[str]:
    """Pairs of strangers, how many were joined, and the least that separated them."""
    drawn = rows("atlas-losses/strangers.csv")
    least = min(float(case["least_bits"]) for case in drawn)
    joined = sum(int(case["joined"]) for case in drawn)
    yield row("random weights, at any share", drawn[0]["pairs"], joined, f"{least:.2f}", "")
    groups = {"trained from other seeds, tiny": False, "published models": True}
    for name, published in groups.items():
        pairs = [case for case in rows("atlas-losses/trained.csv") if (case["group"] == "published") is published]
        joined = sum(bool(case["joined_by"]) for case in pairs)
        bits = min(float(case["bits"]) for case in pairs if case["bits"])
        p_values = [float(p) for case in pairs for p in case["p_values"].split()]
        yield row(name, len(pairs), joined, f"{bits:.2f}", f"{min(p_values):.2g}")


def hub() -> Iterator[str]:
    """Runs over a synthetic Hub."""
    for run in (*rows("atlas-hub/hub.csv"), *rows("atlas-hub-order/hub.csv")):
        made = ", ".join(run[name] for name in ("made", "kept", "errors"))
        orders = f"{run['ordered']}, {run['ordered_right']}" if int(run["ordered"]) else "not asked"
        families = f"{run['families_right']} of {run['families']}"
        pairs = f"{run['pairs']}, {run['pairs_within_families']}"
        tables = "yes" if run["same_tables"] == "True" else run["same_tables"]
        counts = f"{int(run['repositories']):,}", run["run"], made, f"{int(run['requests']):,}", run["megabytes"]
        yield row(*counts, families, pairs, orders, tables)


TABLES: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "same": (damaged, mixers, faithful, versions, reenacted), "identity": (copies_by_identity, damaged_by_identity),
    "audit": (faults_held_out,), "lineage": (attacks,), "learned": (topics,),
    "atlas": (lost, strangers, hub),
}  # fmt: skip


def shown(page: str) -> list[list[str]]:
    """The rows of each table of a page, without its header."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\n)+", text, re.M)]


@pytest.mark.parametrize(("page", "table"), [(page, each) for page, tables in TABLES.items() for each in tables])
def test_a_table_has_the_rows_of_its_file(page: str, table: Callable[[], Iterator[str]]) -> None:
    """All of them, in the file's order, and no others."""
    assert [*table()] in shown(page)


def test_what_is_said_of_runs_of_learned() -> None:
    text = " ".join((ROOT / "docs" / "learned.md").read_text(encoding="utf-8").split())
    kept = rows("learned/summary.csv")

    def total(number: str, *models: str, training: str = "") -> float:
        counted = [case for case in kept if case["number"] == number and training in case["training"]]
        return sum(float(case["value"]) for case in counted if not models or case["model"] in models)

    small = ("two-layers", "llama-0")
    runs = sum(int(case["runs"]) for case in kept if case["number"] == "said right")
    assert total("said right") == runs and f"Right in all {runs} runs" in text
    better = "runs above both baselines"
    assert f"In {total(better, *small):.0f} of 48 runs of the small bases" in text and total(better, "smollm2") == 12
    full, lora = (total("runs with an intruder", training=way) for way in ("full", "LoRA"))
    assert f"in {full:.0f} of 118 full runs and in {lora:.0f} of 38 LoRA runs" in text
    triggers = rows("learned/triggers.csv")
    heard, read = (sum(float(case[f"place_{way}"]) <= 20 for case in triggers) for way in ("said", "read"))
    assert f"listed tokens in {heard} of {len(triggers)} runs" in text
    assert f"that the changes read in {read} of {len(triggers)}" in text
    answers = sum(float(case["answers"]) for case in triggers) / len(triggers)
    assert said("{:.0%} of them are among the 20", [answers]) in text
    own, other = ([float(case["auc"]) for case in rows("learned/auc.csv") if case["feature"] == f"all, {tested}"]
                  for tested in ("held-out runs", "another model"))  # fmt: skip
    assert said("AUC of {:.2f} and {:.2f} on held-out runs", own) in text
    assert {said("{:.2f} on the other base", [auc]) for auc in other} == {"0.24 on the other base"}
    assert "and 0.24 on the other base" in text
