"""Every JSON that a command prints or writes has a schema, which allows neither less nor more than the contract."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource

import weightscope as ws
import weightscope.report.pages
from tests.support.commands import Weights, run, with_tokenizer
from tests.support.figures import undrawn
from tests.support.slow import mostly_checked
from weightscope.cli import main
from weightscope.pairs.claims.claim import statement

SCHEMAS = Path(weightscope.report.pages.__file__).parent / "schemas"
VERSION = 1  # of all schemas
pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `atlas`")

COMMANDS = {  # what prints JSON: the schema of it, and the arguments
    "audit": ("audit", ["embedded", "--all", "--directions", "1"]),
    "audit of a list": ("audits", ["list.txt"]),
    "atlas": ("atlas", ["models.txt"]),
    "compare": ("compare", ["model", "changed", "--all"]),
    "lineage": ("lineage", ["model", "changed", "embedded"]),
    "same": ("same", ["model", "changed"]),
    "id": ("id", ["model"]),
    "card": ("card", ["model"]),
    "learned": ("learned", ["model", "changed", "model"]),
    "verify": ("verify", ["claim.json", "changed", "model"]),
    "inspect": ("inspect", ["model"]),
    # Tables by name; each command has its own shape.
    "circuits": ("tables of circuits", ["model"]),
    "detok": ("tables of detok", ["embedded", "--sample", "200"]),
    "positions": ("tables of positions", ["embedded"]),
    "neighbours": ("tables of neighbours", ["embedded", " ship"]),
    "rank": ("tables of rank", ["embedded"]),
    "families": ("tables of families", []),
    "bigrams": ("tables of bigrams", ["list.txt", "--tokenizer", "embedded", "--out", "counts.npz"]),
    "fingerprint": ("tables of fingerprint", ["model", "--out", "model.wsf"]),
    "reference": ("tables of reference", ["model.txt", "--out", "reference.npz"]),
    "draft": ("tables of draft", ["model"]),
    "inspect --readers": ("tables of readers", ["model", "--readers"]),
}
RUN_THE_MODEL = {"adopt", "convert", "norms", "outliers", "sinks"}  # tried with PyTorch, by their own tests
FOLDERS = {"audit", "atlas", "compare", "lineage", "same", "learned"}  # also write results


def schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / f"{name}-{VERSION}.json").read_text(encoding="utf-8"))


@cache
def validator(name: str) -> Draft202012Validator:
    def retrieve(uri: str) -> Resource[Any]:
        return Resource.from_contents(json.loads((SCHEMAS / uri).read_text(encoding="utf-8")))

    return Draft202012Validator(schema(name), registry=Registry(retrieve=retrieve))


def one_head_is_zero(weights: Weights) -> None:
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name] = weights[name].copy()
    weights[name][:4] = 0


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command prints and the JSON files that it writes, by the names of their schemas."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "model.txt").write_text(f"{folder / 'model'}\n")
    (folder / "list.txt").write_text(f"embedded\n{folder / 'missing'}\n")
    models = "".join(f"{folder / name}\n" for name in ("model", "changed", "missing"))
    (folder / "models.txt").write_text(models)
    model = with_tokenizer("llama", folder / "model")
    with_tokenizer("llama", folder / "changed", one_head_is_zero)
    config = json.loads((model / "config.json").read_text())
    (folder / "changed" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    claimed = statement(ws.lineage(folder / "changed", folder / "model"))
    claimed["predicate"]["verdict"] = "derived"
    (folder / "claim.json").write_text(json.dumps(claimed))
    results: dict[str, Any] = {"claim": claimed}
    for name, (shape, arguments) in COMMANDS.items():
        new = (".npz", ".wsf")
        given = [folder / each if (folder / each).exists() or each.endswith(new) else each for each in arguments]
        with undrawn():
            out = ["--out", folder / name] if name.split()[0] in FOLDERS else []
            done = run(name.split()[0], *given, *out, "--json")
        assert done.exit_code == {"audits": 2, "same": 3, "verify": 3, "card": 3}.get(shape, 0), done.output
        results[shape] = json.loads(done.stdout)
        written = sorted(path for path in (folder / name).rglob("*.json") if ".weightscope" not in path.parts)
        for path in written:
            of_page = path.with_suffix(".html").exists()  # of any name
            key = f"report of {path.relative_to(folder)}" if of_page else f"{path.stem} of {name}"
            results[key] = json.loads(path.read_text())
    with undrawn():
        ws.circuits(model).write(folder / "circuits")
    results["report of circuits/report.json"] = json.loads((folder / "circuits" / "report.json").read_text())
    return results


def test_every_command_with_json_is_tried_here() -> None:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    with_json = {
        name
        for name, command in commands.items()
        if command and any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == {name.split()[0] for name in COMMANDS} | RUN_THE_MODEL
    assert {*commands} - with_json == {"completion"}, "every other command prints JSON"


@pytest.mark.parametrize("path", sorted(SCHEMAS.iterdir()), ids=lambda path: path.stem)
def test_a_schema_is_one(path: Path) -> None:
    stem, _, version = path.stem.rpartition("-")
    assert int(version) == VERSION
    Draft202012Validator.check_schema(schema(stem))
    assert schema(stem)["title"].endswith(f"version {VERSION}")


def test_what_commands_print_and_write_fits_its_schema(printed: dict[str, Any]) -> None:
    for name, value in printed.items():
        validator(name.split()[0]).validate(value)
    named = {name.split()[0] for name in printed} | {"parts"}
    assert {path.stem.rpartition("-")[0] for path in SCHEMAS.iterdir()} == named
    for name in ("audit", "compare", "audits", "lineage", "findings of audit", "directions of audit"):
        assert printed[name]
    assert printed["compare"]["findings"] and printed["compare"]["config"] and printed["lineage"]["kinds"]
    audit, compare, circuits = (printed[f"report of {name}/report.json"] for name in ("audit", "compare", "circuits"))
    assert audit["maps"]["columns"] and audit["everything"] and audit["findings"] and circuits["wiring"]["edges"]
    assert compare["sections"] and printed["report of audit of a list/summary.json"]["sections"]
    assert printed["report of atlas/index.json"]["sections"]
    assert {"config", "tensor"} <= {key for each in printed["same"]["differences"] for key in each}
    assert printed["audits"][1]["error"] and printed["verify"]["differences"]


def test_tables_of_a_command_are_among_its_json(printed: dict[str, Any]) -> None:
    circuits, positions = (printed[f"tables of {name}"] for name in ("circuits", "positions"))
    assert {"layer", "head", "role", "induction"} <= circuits["roles"][0].keys()
    assert {"from_layer", "to_head", "pk"} <= circuits["edges"][0].keys()
    assert {"head", "t_p_slope", "near_mass"} <= positions["trends"][0].keys()


SHAPES = ["atlas", "audit", "compare", "lineage", "same", "learned", "verify", "claim", "inspect"]


@pytest.mark.parametrize("shape", mostly_checked(SHAPES, fast=["audit", "same", "claim"]))
def test_a_key_more_or_less_or_of_another_type_is_refused(shape: str, printed: dict[str, Any]) -> None:
    value, checks = printed[shape], validator(shape)
    optional = set() if shape in ("atlas", "same", "learned", "verify", "claim", "inspect") else {"tensors"}
    for key in value:
        rest = {name: content for name, content in value.items() if name != key}
        assert checks.is_valid(rest) == (key in optional), key
        assert not checks.is_valid(value | {key: {"unexpected": object}}), key
    with pytest.raises(ValidationError, match="unexpected"):
        checks.validate(value | {"more": 1})


def test_a_wrong_row_or_finding_is_refused(printed: dict[str, Any]) -> None:
    audit, checks = printed["audit"], validator("audit")
    head, finding, (source,) = audit["heads"][0], audit["findings"][0], audit["sources"]
    for key, wrong in {
        "heads": [head | {"layer": "0"}],
        "findings": [finding | {"severity": "grave"}],
        "sources": [source | {"files": [{"size": 1}]}],
    }.items():
        assert not checks.is_valid(audit | {key: wrong}), key
