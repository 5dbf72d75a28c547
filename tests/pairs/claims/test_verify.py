"""A claim that holds, and every way in which one does not: each ends in one clear answer, 3 or 2."""

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.commands import is_one_line, run
from tests.support.figures import undrawn
from tests.support.provenance import envelope_in
from tests.support.slow import mostly_checked
from weightscope.core.errors import CheckpointError
from weightscope.model.model import open_model
from weightscope.pairs.claims.claim import AS_IS
from weightscope.pairs.claims.verify import _same_text, verify
from weightscope.pairs.lineage.lineage import lineage
from weightscope.pairs.lineage.sketches import Sketches, load
from weightscope.pairs.lineage.verdict import ComparedBase, judge

ADAPTER = min((Path(__file__).parents[2] / "checkpoint" / "golden" / "adapters").iterdir()) / "adapter"
Edit = Callable[[dict[str, Any]], None]


def verified(claim: Path, suspect: Path, *bases: Path, **options: object) -> tuple[Result, dict[str, Any]]:
    """What `verify --json` prints."""
    more = [word for name, value in options.items() for word in (f"--{name}", value)]
    result = run("verify", claim, suspect, *bases, *more, "--json")
    return result, json.loads(result.stdout) if result.stdout else {}


def edited(claim: Path, edit: Edit, folder: Path) -> Path:
    """The claim after a change."""
    value = json.loads(claim.read_text())
    edit(value)
    (folder / "edited.json").write_text(json.dumps(value))
    return folder / "edited.json"


@pytest.mark.parametrize("name", ["bfloat16", "drift-3", "stranger"])
def test_an_honest_claim_holds(name: str, models: Path, claims: Path) -> None:
    result, answer = verified(claims / f"{name}.json", models / name, models / "base")
    assert result.exit_code == 0, result.output
    assert answer["holds"] and answer["tier"] == "verified by weights" and answer["signature"] == "none"
    assert answer["not_checked"] == ["version", "date"] and answer["differences"] == []
    written = json.loads((claims / f"{name}.json").read_text())["predicate"]
    assert answer["lead"] == f"The claim holds (verified by weights): {written['lead']}"


def test_the_answer_says_what_was_read(models: Path, claims: Path) -> None:
    _, answer = verified(claims / "bfloat16.json", models / "bfloat16", models / "base")
    envelope = [str(claims / "bfloat16.json"), str(models / "bfloat16"), str(models / "base"), "--json"]
    envelope_in(json.dumps(answer), ["verify", *envelope], models / "bfloat16", models / "base", digest=True)


def test_folders_may_be_called_otherwise(models: Path, claims: Path, tmp_path: Path) -> None:
    """Names are the issuer's; the files are what counts."""
    shutil.copytree(models / "bfloat16", tmp_path / "downloaded")
    shutil.copytree(models / "base", tmp_path / "original")
    (tmp_path / "original" / "README.md").unlink()
    result, _ = verified(claims / "bfloat16.json", tmp_path / "downloaded", tmp_path / "original")
    assert result.exit_code == 0, result.output


def test_heads_must_be_shared_by_probes_drawn_anew_too(
    models: Path, claims: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An issuer may have tried nonces until one suited."""
    drawn: list[str] = []

    def without_a_match(suspect: Sketches, base: Sketches) -> ComparedBase:
        drawn.append(suspect.probes.nonce)
        return replace(judge(suspect, base), match=None)

    monkeypatch.setattr("weightscope.pairs.claims.verify.judge", without_a_match)
    result, answer = verified(claims / "drift-3.json", models / "drift-3", models / "base")
    assert result.exit_code == 3
    assert "attention is 'shared' in the claim and 'not shared, by probes drawn anew' here" in answer["lead"]
    claimed = json.loads((claims / "drift-3.json").read_text())["predicate"]["probes"]["nonce"]
    assert len(drawn) == 1 and drawn[0] != claimed


def test_nothing_asks_a_network(models: Path, claims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("somebody was called")

    monkeypatch.setattr(socket.socket, "connect", refuse, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    result = run("verify", claims / "drift-3.json", models / "drift-3", models / "base")
    assert result.exit_code == 0, result.output


def test_rows_of_a_file_are_named_by_their_digest(models: Path, claims: Path, tmp_path: Path) -> None:
    """A claim that was read by rows of the issuer's holds with these rows only."""
    rows, others_rows = tmp_path / "rows.toml", tmp_path / "other.toml"
    rows.write_text('[mine]\nlike = "llama"\n')
    others_rows.write_text('[yours]\nlike = "llama"\n')
    with undrawn():
        arguments = [models / "bfloat16", models / "base", "--out", tmp_path / "out", "--families", rows]
        assert run("lineage", *arguments, "--attest", tmp_path / "claim.json").exit_code == 0
    for families, status in ((rows, 0), (others_rows, 3), (None, 3)):
        options = {"families": families} if families else {}
        result, answer = verified(tmp_path / "claim.json", models / "bfloat16", models / "base", **options)
        assert result.exit_code == status, result.output
        assert ("options.families is" in answer["lead"]) == (status == 3)


# Fields


def predicate(**changes: Any) -> Edit:
    return lambda claim: claim["predicate"].update(changes)


def within(*path: str | int, value: Any) -> Edit:
    def edit(claim: dict[str, Any]) -> None:
        for key in path[:-1]:
            claim = claim[key]  # type: ignore[index]
        claim[path[-1]] = value  # type: ignore[index]

    return edit


ZEROS = "0" * 64
# Each leaf of a claim is edited below; these have other shapes, or show what is said.
LIES: dict[str, tuple[Edit, str]] = {
    "another verdict": (predicate(verdict="related"), "verdict is 'related' in the claim and 'derived' here"),
    "a smaller p": (predicate(p_value=1e-320), "p_value is 1e-320"),
    "an endless number": (predicate(p_value=10**400), "p_value is '1000"),
    "a layer less": (lambda claim: claim["predicate"]["layers"].pop(), "layers is "),
    "a likeness that is true": (within("predicate", "layers", 0, "likeness", value=True), "layers[0].likeness is True"),
    "one comparison less": (predicate(comparisons=2), "comparisons is 2 in the claim and 3 here"),
    "a field more in a kind": (within("predicate", "kinds", 0, "proof", value="sworn"), "kinds[0].proof is 'sworn'"),
    "another model in the sentence": (
        lambda claim: predicate(lead=claim["predicate"]["lead"].replace("base", "base-3.1"))(claim), "lead is"),
    "weights of a merge": (predicate(weights={"base": 1.0}), "weights.base is 1.0 in the claim and None here"),
    "doubts": (predicate(doubts=["none"]), "doubts is"),
    "a word more about the base": (within("predicate", "bases", 0, "owner", value="me"), "bases[0].owner is 'me'"),
    "another serialization": (predicate(serialization={"method": "shards"}), "serialization.hash_type is None"),
    "another file of the suspect": (
        lambda claim: claim["subject"].append({"name": "more", "digest": {"sha256": ZEROS}}), "subject[more] is"),
    "other files of the base": (
        within("predicate", "bases", 0, "files", 1, "digest", "sha256", value=ZEROS),
        "bases[0].files[model.safetensors] is"),
    "no probes": (predicate(probes=None), "probes is None in the claim"),
    "a base by a fingerprint": (
        within("predicate", "bases", 0, "read_from", value="fingerprint"),
        "tier is 'verified by weights' in the claim and 'indexed' here"),
}  # fmt: skip


@pytest.mark.parametrize("lie", mostly_checked(LIES, fast=[*LIES][::3]))
def test_an_edited_claim_does_not_hold(lie: str, models: Path, claims: Path, tmp_path: Path) -> None:
    edit, expected = LIES[lie]
    result, answer = verified(edited(claims / "bfloat16.json", edit, tmp_path), models / "bfloat16", models / "base")
    assert result.exit_code == 3, result.output
    assert not answer["holds"] and answer["lead"].startswith("The claim does not hold: ")
    assert expected in answer["lead"] and len(answer["differences"]) >= 1
    assert answer["lead"].isprintable() and len(answer["lead"]) < 1500


def test_a_claim_about_other_files_does_not_hold(models: Path, claims: Path) -> None:
    """Nothing is computed: what the claim says is about other files."""
    for suspect, base, where in (("drift-3", "base", "subject"), ("bfloat16", "stranger", "bases[0].files")):
        result, answer = verified(claims / "bfloat16.json", models / suspect, models / base)
        assert result.exit_code == 3 and answer["tier"] is None
        assert f"{where}[model.safetensors] is" in answer["lead"]


def test_another_version_of_weightscope_is_named_where_it_differs(models: Path, claims: Path, tmp_path: Path) -> None:
    of_later = edited(claims / "bfloat16.json", predicate(version="9.0"), tmp_path)
    assert verified(of_later, models / "bfloat16", models / "base")[0].exit_code == 0
    of_later = edited(of_later, predicate(verdict="related"), tmp_path)
    _, answer = verified(of_later, models / "bfloat16", models / "base")
    assert answer["lead"].endswith("It was made by weightscope '9.0'.")


def test_numbers_may_differ_in_what_machines_round_otherwise(models: Path, claims: Path, tmp_path: Path) -> None:
    def rounded(claim: dict[str, Any]) -> None:
        for layer in claim["predicate"]["layers"]:
            layer["likeness"] *= 1 - 1e-4
            layer["z"] *= 1 + 1e-3

    claim = edited(claims / "drift-3.json", rounded, tmp_path)
    result, _ = verified(claim, models / "drift-3", models / "base")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("claim", "found", "same"),
    [
        ("a likeness of 0.97 (p = 3e-50, 3 comparisons)", "a likeness of 0.98 (p = 2e-50, 3 comparisons)", True),
        ("a likeness of 0.97", "a likeness of 0.99", False),
        ("3 of 5 layers", "4 of 5 layers", False),
        ("p = 9e-50", "p = 9e-51", False),
        ("p = 1e-50", "p = 9e-51", True),
        ("p = 1e-99", "p = 1e-999", False),
        ("p = 1e-99", "p = 0", False),
        ("Llama-3.1 and base", "Llama-3.2 and base", False),
        ("x-3.1 was", "x-3.1 was", True),
        ("moved 1,024.5 of", "moved 1,024.6 of", True),
        ("a, b", "a; b", False),
    ],
)
def test_texts_may_differ_in_the_last_digit_of_a_measured_number(claim: str, found: str, same: bool) -> None:
    assert _same_text(claim, found, ["Llama-3.1", "base"]) is same


# Every field that is recomputed

Leaf = tuple[tuple[str | int, ...], Any]


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """Every value in a statement that is no container, or an empty one, with its place."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, each in inner:
        yield from leaves(each, (*path, key))
    if not inner:
        yield path, value


def lies_about(value: Any) -> list[Any]:
    """Values that differ from another beyond every stated tolerance."""
    if isinstance(value, bool) or value is None:
        return [value is None, 0, "None"]
    if isinstance(value, int):
        return [value + 1, str(value), None]
    if isinstance(value, float):
        return [value * 1.03 + 0.03, 0.0 if abs(value) > 1e-5 else 1.0, -1.0, str(value), None]
    if not isinstance(value, str):
        return [[*value, "more"] if isinstance(value, list) else {"more": 1}, None]
    exchanged = value.replace("base", "\0").replace("drift-3", "base").replace("\0", "drift-3")
    numbers = [value[: m.start()] + "9" + value[m.start() :] for m in re.finditer(r"\d(\.\d+)?", value)]
    return [value + ".", value[1:], "", None, *{exchanged, value.swapcase()} - {value}, *numbers]


@pytest.mark.check
def test_every_edit_of_a_recomputed_field_fails(
    models: Path, claims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leaf of a claim in turn: another value of its type, another type, none, exchanged names, no such key."""
    suspect, base = open_model(models / "drift-3"), open_model(models / "base")
    computed: dict[Any, Any] = {}

    def computed_once(suspect: Any, bases: Any, **options: Any) -> Any:
        key = suspect.name, *(each.name for each in bases), *options.items()
        if key not in computed:
            computed[key] = lineage(suspect, bases, **options)
        return computed[key]

    monkeypatch.setattr("weightscope.pairs.claims.verify.lineage", computed_once)
    unnoticed, tried = [], 0
    for path, value in leaves(json.loads((claims / "drift-3.json").read_text())):
        if path in (("predicate", "version"), ("predicate", "date")):
            continue
        edits = [within(*path, value=lie) for lie in lies_about(value)]
        for lie, edit in [*zip(lies_about(value), edits, strict=True), ("no such key", without(*path))]:
            try:
                holds = verify(edited(claims / "drift-3.json", edit, tmp_path), suspect, [base], options=AS_IS).holds
            except CheckpointError:
                holds = False
            unnoticed += [(path, value, lie)] if holds else []
            tried += 1
    assert not unnoticed
    assert tried > 100


def without(*path: str | int) -> Edit:
    """The statement without one of its values."""

    def edit(claim: dict[str, Any]) -> None:
        for key in path[:-1]:
            claim = claim[key]  # type: ignore[index]
        del claim[path[-1]]  # type: ignore[arg-type]

    return edit


def test_the_sentence_is_the_recomputed_one(models: Path, claims: Path, tmp_path: Path) -> None:
    """A number of the claim's sentence may differ in its last digit; what is printed is this run's."""
    written = json.loads((claims / "drift-3.json").read_text())["predicate"]["lead"]
    nearly = written.replace("likeness of 1.00", "likeness of 1.01")
    claim = edited(claims / "drift-3.json", predicate(lead=nearly), tmp_path)
    _, answer = verified(claim, models / "drift-3", models / "base")
    assert nearly != written and answer["holds"] and written in answer["lead"] and nearly not in answer["lead"]


def test_version_and_date_are_not_verified(models: Path, claims: Path) -> None:
    result = run("verify", claims / "drift-3.json", models / "drift-3", models / "base")
    assert "Not verified: version, date." in result.stdout


@pytest.mark.parametrize("option, value", [("tower", ""), ("tower", "vision"), ("families", "0" * 64)])
def test_edited_options_fail_without_the_command(
    option: str, value: str, models: Path, claims: Path, tmp_path: Path
) -> None:
    """Checkpoints given by name are opened with the claim's tower; a file of rows was not given."""
    claim = edited(claims / "drift-3.json", within("predicate", "options", option, value=value), tmp_path)
    try:
        holds = verify(claim, models / "drift-3", [models / "base"]).holds
    except CheckpointError:
        holds = False
    assert not holds


def test_exchanged_names_are_another_sentence() -> None:
    names = ["3.1", "base", "susp"]
    assert not _same_text("base was derived from susp", "susp was derived from base", names)
    assert not _same_text("3.2 is base", "3.1 is base", names), "a name of digits is a name"
    assert not _same_text("# of 3 layers", "3 of # layers", names)


# Claims that cannot be read

UNREADABLE: dict[str, tuple[Edit, str]] = {
    "another version": (within("predicateType", value="https://weightscope/lineage/v2"), "this version reads https"),
    "another predicate": (within("predicateType", value="https://slsa.dev/provenance/v1"), "predicateType is"),
    "another statement": (within("_type", value="https://in-toto.io/Statement/v0.1"), "_type is"),
    "no predicate": (within("predicate", value=[]), "it has no predicate"),
    "no verdict": (lambda claim: claim["predicate"].pop("verdict"), "it lacks verdict"),
    "no subject": (lambda claim: claim.pop("subject"), "subject should be a list of 1 to 1,100"),
    "an empty subject": (within("subject", value=[]), "subject should be a list of 1 to 1,100"),
    "a subject of numbers": (within("subject", value=[1]), "a name should be a text"),
    "a digest of 63 digits": (within("subject", 0, "digest", "sha256", value="0" * 63), "as 64 hexadecimal digits"),
    "a digest of SHA-1": (within("subject", 0, "digest", value={"sha1": "0" * 40}), "should have a SHA-256"),
    "a file twice": (lambda claim: claim["subject"].append(claim["subject"][0]), "subject has 'config.json' twice"),
    "many files": (lambda claim: claim["subject"].extend(claim["subject"] * 1000), "of 1 to 1,100 entries"),
    "a note": (predicate(note="Counsel agrees."), "it holds what nothing is known of: 'note'"),
    "no bases": (predicate(bases=[]), "bases should be a list of 1 to 64"),
    "two bases of one name": (
        lambda claim: claim["predicate"]["bases"].append(claim["predicate"]["bases"][0]), "two bases have one name"),
    "a base that was not given": (
        lambda claim: claim["predicate"]["bases"].append(claim["predicate"]["bases"][0] | {"name": "more"}),
        "is about 2 bases ('base', 'more'); 1 given"),
    "a base read from hearsay": (
        within("predicate", "bases", 0, "read_from", value="hearsay"), "read_from weights or fingerprint"),
    "a base without heads": (lambda claim: claim["predicate"]["bases"][0].pop("heads"), "the digest of its heads"),
    "a nonce that is a number": (within("predicate", "probes", "nonce", value=3), "probes should be null, or a seed"),
    "a nonce of a megabyte": (within("predicate", "probes", "nonce", value="0" * 10**6), "of 1 to 1000 characters"),
    "a name of 1,001 letters": (within("predicate", "suspect", "name", value="a" * 1001), "1 to 1000 characters"),
    "options of another kind": (predicate(options={"tower": 3}), "options should be tower, families"),
    "a tower that is a list": (predicate(options={"tower": [], "families": None}), "should be a text or null"),
    "a tower that is not there": (
        predicate(options={"tower": "vision", "families": None}), "opened with --tower vision, as the claim says"),
}  # fmt: skip


@pytest.mark.parametrize("attack", UNREADABLE)
def test_what_is_no_claim_is_one_clear_error(attack: str, models: Path, claims: Path, tmp_path: Path) -> None:
    edit, expected = UNREADABLE[attack]
    result = run("verify", edited(claims / "bfloat16.json", edit, tmp_path), models / "bfloat16", models / "base")
    assert is_one_line(result) and expected in result.stderr, result.output
    assert len(result.stderr) < 400


TEXTS = {
    "nothing": ("", "is not valid JSON"),
    "a list": ("[]", "an object was expected"),
    "another file": ('{"verdict": "derived"}', "_type is 'None'"),
    "a key twice": ('{"_type": 1, "_type": 2}', "key '_type' appears twice"),
    "nested": ('{"a":' * 900 + "1" + "}" * 900, "nests deeper"),
    "huge": ('{"a": "' + "a" * 16_000_001 + '"}', "has more than 16000000 bytes"),
    "an envelope that is a number": ('{"dsseEnvelope": 1}', "is a damaged envelope"),
    "an envelope of no type": ('{"payload": "e30=", "signatures": []}', "payloadType is 'None'"),
    "an envelope without signatures": (
        '{"payload": "e30=", "payloadType": "application/vnd.in-toto+json"}', "signatures were expected"),
    "a payload that is not base64": (
        '{"payload": "%", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": ""}]}', "damaged"),
    "a payload that is empty": (
        '{"payload": "", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": ""}]}',
        "its payload is not valid JSON"),
    "a signature without its value": (
        '{"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": [{}]}', "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("attack", TEXTS)
def test_a_damaged_file_is_one_clear_error(attack: str, models: Path, tmp_path: Path) -> None:
    text, expected = TEXTS[attack]
    (tmp_path / "claim.json").write_text(text)
    result = run("verify", tmp_path / "claim.json", models / "bfloat16", models / "base")
    assert is_one_line(result) and expected in result.stderr, result.output


# Fingerprints


def test_from_a_fingerprint_the_claim_is_indexed(models: Path, claims: Path) -> None:
    result, answer = verified(claims / "bfloat16.json", models / "bfloat16", models / "base.wsf")
    assert result.exit_code == 4 and answer["tier"] == "indexed" and answer["undecided"]
    assert {"verdict", "direction", "kinds", "lead", "p_value"} <= {*answer["not_checked"]}
    assert "derived" not in answer["lead"], "a direction that was not checked is not repeated"
    assert "that it was made from the claimed files is its maker's word" in run(
        "verify", claims / "bfloat16.json", models / "bfloat16", models / "base.wsf"
    ).stdout.replace("\n", " ")


def test_a_claim_by_a_fingerprint_holds_by_the_weights_that_it_names(models: Path, claims: Path) -> None:
    for base, tier, lead, status in (
        ("base.wsf", "indexed", "The claim holds", 0),
        ("base", "verified by weights", "Undecided: as far as", 4),
    ):
        result, answer = verified(claims / "by-print.json", models / "bfloat16", models / base)
        assert (result.exit_code, answer["tier"]) == (status, tier), result.output
        assert answer["lead"].startswith(lead)
    for base, where in (("stranger.wsf", "bases[0].files[base.wsf]"), ("stranger", "bases[0].files[heads]")):
        result, answer = verified(claims / "by-print.json", models / "bfloat16", models / base)
        assert result.exit_code == 3 and f"{where} is" in answer["lead"]


def test_a_claim_of_no_shared_heads_is_indexed_too(models: Path, claims: Path) -> None:
    result, answer = verified(claims / "stranger.json", models / "stranger", models / "base.wsf")
    assert result.exit_code == 4, result.output
    assert answer["lead"].endswith("holds (indexed): stranger shares no heads with base.")


def test_a_fingerprint_by_a_key_needs_the_key(models: Path, claims: Path, tmp_path: Path) -> None:
    key, base = tmp_path / "key", tmp_path / "base.wsf"
    key.write_bytes(bytes(range(32)))
    assert run("fingerprint", models / "base", "--out", base, "--probe-key", key).exit_code == 0
    result, answer = verified(claims / "bfloat16.json", models / "bfloat16", base, **{"probe-key": key})
    assert result.exit_code == 4 and answer["tier"] == "indexed", result.output
    result = run("verify", claims / "bfloat16.json", models / "bfloat16", base)
    assert is_one_line(result) and "give that key" in result.stderr


def test_a_fingerprint_of_another_model_does_not_do(models: Path, claims: Path) -> None:
    result, answer = verified(claims / "bfloat16.json", models / "bfloat16", models / "stranger.wsf")
    assert result.exit_code == 3 and "bases[0].files[heads] is" in answer["lead"]


def test_a_fingerprint_that_does_not_say_what_it_was_made_of_is_refused(models: Path, claims: Path) -> None:
    result = run("verify", claims / "bfloat16.json", models / "bfloat16", models / "silent.wsf")
    assert is_one_line(result) and "make it again with `weightscope fingerprint`" in result.stderr


def test_a_suspect_must_have_weights(models: Path, claims: Path) -> None:
    result = run("verify", claims / "bfloat16.json", models / "base.wsf", models / "base")
    assert is_one_line(result) and "the suspect's weights are needed" in result.stderr


@pytest.mark.parametrize("places", [("base", "{}"), ("{}", "base")])
def test_folders_of_fingerprints_and_adapters_are_refused(
    places: tuple[str, str], models: Path, claims: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    for source, expected in ((".", "give the .wsf file of each BASE"), (ADAPTER, "is an adapter: merge the adapter")):
        result = run("verify", claims / "bfloat16.json", *(place.format(source) for place in places))
        assert is_one_line(result) and expected in result.stderr


def forged(path: Path, named: Path, made: Path) -> Path:
    """The fingerprint `made`, which says that it was made of the files that `named` was made of."""
    sketches, word = load(made), load(named).about["heads_sha256"]
    replace(sketches, about=sketches.about | {"heads_sha256": word, "name": "base"}).save(path)
    return path


def test_a_forged_fingerprint_can_break_a_true_claim_and_bear_out_a_false_one(
    models: Path, claims: Path, tmp_path: Path
) -> None:
    """Both as "indexed" only; the weights show it."""
    of_stranger = forged(tmp_path / "base.wsf", models / "base.wsf", models / "stranger.wsf")
    result, answer = verified(claims / "bfloat16.json", models / "bfloat16", of_stranger)
    assert result.exit_code == 3 and "attention is 'shared' in the claim and 'not shared' here" in answer["lead"]
    (tmp_path / "false").mkdir()
    of_base = forged(tmp_path / "false" / "base.wsf", models / "stranger.wsf", models / "base.wsf")

    (stranger,) = json.loads((claims / "bfloat16-stranger.json").read_text())["predicate"]["bases"]
    claim = edited(claims / "bfloat16.json", predicate(bases=[stranger | {"name": "base"}]), tmp_path)
    result, answer = verified(claim, models / "bfloat16", of_base)
    assert result.exit_code == 4 and answer["tier"] == "indexed"
    result, answer = verified(claim, models / "bfloat16", models / "stranger")
    assert result.exit_code == 3
    assert {"field": "attention", "claim": "shared", "found": "not shared"} in answer["differences"]
