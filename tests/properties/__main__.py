"""The long run, from the command line: `python -m tests.properties N [SEED [SOURCE ...]]`.

N cases of each source and group: a change of its values, its config, its gauge, or how it is written.
"""

import sys
from collections import Counter

from hypothesis import given, seed

from tests.properties.cases import CHANGES, GROUPS, SOURCES, Case, cases, drawn, places_of
from tests.properties.characters import kinds, swept
from tests.properties.relations import FAILS, Outcome, counted, outcomes


def main() -> None:
    n, drawn_by = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    results = sweep(n, drawn_by, tuple(sys.argv[3:]) or SOURCES)
    table(counted(results))
    if not sys.argv[3:]:
        for kind in kinds():
            number, missed = swept(kind)
            print(f"{kind}: {number} characters changed, {len(missed)} not seen", *missed, sep="\n    ")
    sys.exit(any(each.said.startswith(FAILS) and each.kind == "relation" for _, each in results))


def sweep(n: int, drawn_by: int, sources: tuple[str, ...]) -> list[tuple[Case, Outcome]]:
    """Outcomes of n cases of each source and group; none stops the run."""
    results: list[tuple[Case, Outcome]] = []

    def run(case: Case) -> None:
        each_outcome = [*outcomes(case)]
        results.extend((case, each) for each in each_outcome)
        failed = [each for each in each_outcome if each.kind == "relation" and each.said.startswith(FAILS)]
        for each in failed:
            print(f"{each.name} {each.said}\n    {case!r},", flush=True)

    for source in sources:
        for group in GROUPS:
            if any(places_of(source, group, change) for change in CHANGES[group]):
                seed(drawn_by)(drawn(n)(given(cases((source,), (group,)))(run)))()
    return results


def table(counts: Counter[tuple[str, ...]]) -> None:
    """Print the number of each answer, a column for each group of cases."""
    print(f"{'':52}" + "".join(f"{group:>18}" for group in GROUPS))
    for kind, name, answer in sorted({(kind, name, answer) for kind, name, _, answer in counts}, reverse=True):
        numbers = "".join(f"{counts[kind, name, group, answer] or '':>18}" for group in GROUPS)
        print(f"{name + ': ' + answer:52}{numbers}")


if __name__ == "__main__":
    main()
