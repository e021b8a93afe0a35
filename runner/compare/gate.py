"""Accept a change if its runs have the bits of the baseline's, or if they are better."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samewise.runner.compare.comparison import MOST, PairedComparison, Study
from samewise.runner.compare.ledger import Ledger
from samewise.runner.compare.sides import Place, Side, find_side
from samewise.runner.errors import number_of
from samewise.runner.paired import LEVEL
from samewise.runner.records.folder import RunFolder
from samewise.runner.verify import two_runs


@dataclass(frozen=True)
class Verdict:
    """Whether a change is accepted, and why.

    Args:
        accepted: Whether it is.
        sentence: The reason with its figures.
        notes: What is known of the bits, and what the number of the try means, as sentences.
        ledger: The line of the ledger: `verdict`, which is `same bits` or the comparison's, `try`
            (0: nothing is claimed), `level`, and `sha256`, the digest of the line, and so of all.
        comparison: The pairs; None with the same bits.
    """

    accepted: bool
    sentence: str
    notes: Sequence[str]
    ledger: Mapping[str, Any]
    comparison: PairedComparison | None = None

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{'accepted' if self.accepted else 'not accepted'}: {self.ledger['verdict']}",
                self.sentence,
                *self.notes,
                f"ledger {self.ledger['sha256']}",
            ]
        )


def gate(
    proposal: str,
    baseline: str,
    place: Place,
    *,
    metric: str | None = None,
    seeds: int | None = None,
    until: float | None = None,
    budget: int | None = None,
) -> Verdict:
    """Decide whether a proposal replaces a baseline, and record it in the ledger.

    Args:
        proposal: Name of a setting, as `sides.find_sides` takes it.
        baseline: That of the baseline.
        place: Where the runs and the ledger are.
        metric: As in `compare`; None: the baseline's `evaluate.monitor`.
        seeds: As in `compare`.
        until: As in `compare`.
        budget: As in `compare`.

    Raises:
        ConfigError: There are no such settings or no pairs, or the ledger was rewritten.
    """
    sides = find_side(proposal, place), find_side(baseline, place)
    if sides[0].name == sides[1].name:
        # They differ in the code alone
        names = Path(proposal).name, Path(baseline).name
        sides = replace(sides[0], name=names[0]), replace(sides[1], name=names[1])
    return judge(*sides, metric=metric, seeds=seeds, until=until, budget=budget)


def judge(
    proposal: Side,
    baseline: Side,
    *,
    metric: str | None = None,
    seeds: int | None = None,
    until: float | None = None,
    budget: int | None = None,
) -> Verdict:
    """Decide as `gate`, with sides."""
    study = Study(proposal, baseline, metric or str(baseline.config.cfg.evaluate.monitor))
    most = seeds or (0 if until is None and budget is None else MOST)
    ledger, sides = Ledger(baseline.place.run_root), (proposal, baseline)
    # Before anything is trained
    ledger.read()
    facts: dict[str, Any] = {
        "question": study.file.stem,
        "sides": [side.name for side in sides],
        "fingerprints": [hashlib.sha256(x.key.encode()).hexdigest()[:12] for x in sides],
        "metric": study.metric,
    }
    # With the same bits, a pair is all that is trained
    budget = study.train(min(1, most), None, budget, LEVEL)
    count, differing = _compare_bits(sides)
    if count and not differing:
        sentence = (
            f"{' and '.join(facts['sides'])} have the same bits in {number_of(count, 'pair')}"
        )
        return Verdict(
            True, sentence, [], ledger.record(verdict="same bits", claims=False, **facts)
        )
    level = ledger.record(verdict="begun", claims=True, **facts)["level"]
    study.train(most, until, budget, level)
    study.read()
    study.look()
    comparison = study.compare(level, until or 0.0)
    line = ledger.record(
        verdict=comparison.verdict, claims=True, pairs=comparison.estimate.pairs, **facts
    )
    notes = [
        f"the bits differ: samewise diff {differing[0].path} {differing[1].path}"
        if differing
        else "the bits were not compared: no two runs with one seed are here",
        f"try {line['try']}: its claim is false in at most {100 * level:.2g} %, and any claim of "
        f"this ledger in at most {100 * LEVEL:.0f} %",
        *comparison.notes,
    ]
    return Verdict(comparison.verdict == "better", str(comparison), notes, line, comparison)


def _compare_bits(sides: Sequence[Side]) -> tuple[int, Sequence[RunFolder] | None]:
    """Return the number of pairs of finished runs, and the first pair with other bits."""
    runs = [side.folders() for side in sides]
    seeds = set.intersection(*({*x} for x in (*runs, *(side.values() for side in sides))))
    pairs = [[some[seed] for some in runs] for seed in sorted(seeds)]
    return len(pairs), next((x for x in pairs if not two_runs.compare(*x).same), None)
