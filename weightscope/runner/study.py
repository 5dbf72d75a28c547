"""The result of a study: a question that is answered by running a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from weightscope.provenance import Provenance
from weightscope.results import Result
from weightscope.runner.runner import Runner


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Study(Result):
    """What a run of a model has shown."""

    model: str  # its name
    source: str = ""  # where the inputs come from
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @classmethod
    def of(cls, runner: Runner, **measured: Any) -> Self:
        """The result of what was measured while the model ran."""
        measured.setdefault("model", runner.model.title)
        return cls(**measured, provenance=Provenance.of(runner.model.checkpoint))

    def printed(self) -> Sequence[str]:
        """The lines that a terminal shows."""
        return [self.lead]
