"""What libraries warn of does not reach the terminal; what is wrong with weights, findings say."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.heads.detok.first_layer import FirstLayer, position_terms

ROOT = str(Path(ws.__file__).parents[1])
Weights = dict[str, np.ndarray]


def all_of(value: float) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: np.full_like(w, value) for name, w in weights.items()})


def one(name: str, value: float) -> Callable[[Weights], object]:
    return lambda weights: weights[name].flat.__setitem__(0, value)


SPOILT: dict[str, Callable[[Weights], object]] = {
    "NaN": one("h.0.attn.c_attn.weight", np.nan),
    "NaN in a norm": one("h.0.ln_1.weight", np.nan),
    "infinity in the embedding": one("wte.weight", np.inf),
    "all NaN": all_of(np.nan),
    "all zero": all_of(0),
    "all one": all_of(1),
    "large queries": lambda weights: weights["h.0.attn.c_attn.weight"].__imul__(np.float32(1e37)),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_no_warning_of_broken_weights(spoilt: str, tmp_path: Path) -> None:
    weights = gpt2_weights()
    good = ws.open_model(write_checkpoint(tmp_path / "good", weights))
    SPOILT[spoilt](weights)
    model = ws.open_model(write_checkpoint(tmp_path / "spoilt", weights))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audit, comparison = ws.audit(model), ws.compare(good, model)
        assert str(audit) and audit.findings and str(comparison)
        audit.plot()
        comparison.plot()
        try:
            position_terms(FirstLayer(model), 20, unscaled=True)
        except ws.CheckpointError as error:
            assert "model.safetensors" in str(error)


def test_integer_tensors_next_to_a_nan_are_not_weights(tmp_path: Path) -> None:
    """Buffers such as position_ids, which old checkpoints hold."""
    weights = gpt2_weights()
    SPOILT["NaN"](weights)
    alone = ws.audit(ws.open_model(write_checkpoint(tmp_path / "alone", weights)))
    weights |= {"h.0.attn.position_ids": np.arange(32), "position_ids": np.arange(32)}
    with_buffers = ws.audit(ws.open_model(write_checkpoint(tmp_path / "with-buffers", weights)))
    assert [str(finding) for finding in with_buffers.findings] == [str(finding) for finding in alone.findings]
    assert with_buffers.heads.csv() == alone.heads.csv()


LOUD = """
import logging, warnings
import click, numpy as np
from weightscope.cli.command import EndsInOneLine

@click.command(cls=EndsInOneLine)
def main():
    np.log(np.zeros(1))
    warnings.warn("a library's")
    logging.getLogger("matplotlib.font_manager").warning("findfont: no such font")
    click.echo("weightscope: its own line", err=True)

main()
"""


def test_only_commands_print_to_stderr() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOUD], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert (run.returncode, run.stderr) == (0, "weightscope: its own line\n")
