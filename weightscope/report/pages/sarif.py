"""Findings as SARIF 2.1.0 (OASIS), which code scanning reads."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]
SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
MOST_PLACED = 100  # members of a finding that are listed as places; all are in findings.json
TOOL = {"name": "weightscope", "informationUri": "https://pypi.org/project/weightscope-attention/"}


def sarif_log(results: Iterable[Mapping[str, Any]]) -> Json:
    """One run per result, as `--json` prints an audit or a comparison.

    Parameters
    ----------
    results : iterable of mapping
        Keys of every result, `findings`, and `error` where a checkpoint of a list could
        not be read.

    Returns
    -------
    dict
        A log. Severities are levels, known findings are suppressed, layers, heads and tensors are
        logical locations.
    """
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(result) for result in results]}


def _run(result: Mapping[str, Any]) -> Json:
    findings, error = result.get("findings", []), result.get("error")
    kinds = {finding["kind"]: finding for finding in findings}
    files = [(source, file) for source in result["sources"] for file in source["files"]]
    artifacts = []
    for source, file in files:
        artifact: Json = {"location": {"uri": _uri(source, file)}}
        if "size" in file:
            artifact["length"] = file["size"]
        if "sha256" in file:
            artifact["hashes"] = {"sha-256": file["sha256"]}
        artifacts.append(artifact)
    weights = [_uri(source, file) for source, file in files if "header_sha256" in file]
    invocation: Json = {"executionSuccessful": not error, "endTimeUtc": result["date"]}
    if result["command"]:
        invocation["commandLine"] = result["command"]
    if error:
        invocation["toolExecutionNotifications"] = [{"level": "error", "message": {"text": error}}]
    rules = [_rule(finding) for finding in kinds.values()]
    file, places = weights[-1] if weights else "", [*kinds]
    shown = [_result(finding, places.index(finding["kind"]), file) for finding in findings]
    return {
        "tool": {"driver": {**TOOL, "version": result["version"], "rules": rules}},
        "invocations": [invocation],
        "artifacts": artifacts,
        "results": shown,
        "properties": {"lead": result["lead"]},
    }


def _uri(source: Mapping[str, Any], file: Mapping[str, Any]) -> str:
    """A file's path as the command was given it."""
    name = source["name"].rstrip("/")
    return quote(name if name.endswith(file["name"]) else f"{name}/{file['name']}")


def _rule(finding: Mapping[str, Any]) -> Json:
    """A kind of finding."""
    about = {"shortDescription": {"text": finding["title"]}, "help": {"text": finding["look_next"]}}
    return {"id": finding["kind"], **about, "defaultConfiguration": {"level": finding["severity"]}}


def _result(finding: Mapping[str, Any], rule: int, weights: str) -> Json:
    """A finding: the last checkpoint's file, places, and an identity regardless of its number."""
    members = finding["members"]
    places = [_place(finding, member) for member in members[:MOST_PLACED]] or [_place(finding, {})]
    location: Json = {"logicalLocations": places}
    if weights:  # code scanning shows a result in a file, and asks for a line
        place = {"artifactLocation": {"uri": weights}, "region": {"startLine": 1}}
        location["physicalLocation"] = place
    identity = [finding[key] for key in ("kind", "layer", "head", "map", "measure")]
    identity += [[member[key] for key in ("what", "index", "layer", "name")] for member in members]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    numbers = {key: finding[key] for key in ("measure", "number", "usual")}
    result: Json = {
        "ruleId": finding["kind"],
        "ruleIndex": rule,
        "level": finding["severity"],
        "message": {"text": finding["text"]},
        "locations": [location],
        "partialFingerprints": {"finding/v1": digest},
        "properties": {**numbers, "members": len(members)},
    }
    if finding["known"]:
        result["suppressions"] = [{"kind": "external", "justification": finding["known"]}]
    return result


def _place(finding: Mapping[str, Any], member: Mapping[str, Any]) -> Json:
    """A tensor by name; else layer, head and map, and the member's kind: `layer 3/head 7/qk`."""
    if member.get("what") == "tensor":
        return {"fullyQualifiedName": member["name"], "kind": "tensor"}
    layer = finding["layer"] if member.get("layer") is None else member["layer"]
    steps = [] if layer is None else [("layer", layer)]
    if member.get("index") is not None and (member["what"], member["index"]) not in steps:
        steps.append((member["what"], member["index"]))
    elif not member and finding["head"] is not None:
        steps.append(("head", finding["head"]))
    names = [f"{what} {index}" for what, index in steps]
    if finding["map"]:
        names.append(finding["map"])
    kind = steps[-1][0] if steps else "model"
    place = {"fullyQualifiedName": "/".join(names) or "model", "kind": kind}
    return place | ({"name": member["name"]} if member.get("name") else {})
