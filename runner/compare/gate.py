"""Accept a change if its runs have the bits of the baseline's, or if they are better."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samewise.runner.compare.comparison import MOST, PairedComparison, Study
from samewise.runner.compare.ledger import Ledger
from samewise.runner.compare.sides import Place, Side, find_side
from samewise.runner.errors import number_of
from samewise.runner.paired import LEVEL
from samewise.runner.records.folder import RunFolder
from samewise.runner.verify import two_runs

SAME_BITS = "same bits"


@dataclass(frozen=True)
class Verdict:
    """Whether a change is accepted, and why.

    Args:
        accepted: Whether it is.
        reason: `same bits`, or the comparison's verdict: `better`, `worse`, `the same` or `not
            distinguishable`.
        sentence: The reason with its figures.
        notes: What the bits and the number of the try are, as sentences.
        number: Number of the try in the ledger; 0: with the same bits nothing is claimed.
        level: The share of false claims that the try may make.
        comparison: The pairs; None with the same bits.
        ledger_sha256: Digest of the ledger's last line, and so of all lines.
    """

    accepted: bool
    reason: str
    sentence: str
    notes: Sequence[str]
    number: int
    level: float
    comparison: PairedComparison | None
    ledger_sha256: str

    def __str__(self) -> str:
        head = f"{'accepted' if self.accepted else 'not accepted'}: {self.reason}"
        return "\n".join([head, self.sentence, *self.notes])


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
    trains = bool(seeds) or until is not None or budget is not None
    ledger, sides = Ledger(baseline.place.run_root), (proposal, baseline)
    # Before anything is trained
    ledger.read()
    question = study.file.stem
    facts = {
        "sides": [side.name for side in sides],
        "fingerprints": [hashlib.sha256(x.key.encode()).hexdigest()[:12] for x in sides],
        "metric": study.metric,
    }
    if trains and not study.read():
        # With the same bits, this is all that is trained
        budget = study.train(1, None, budget, LEVEL)
    equal, differing = _compare_bits(*sides)
    if equal and not differing:
        sentence = f"{proposal.name} and {baseline.name} have the same bits in {_pairs(equal)}"
        line = ledger.record(question, SAME_BITS, claims=False, **facts)
        return Verdict(True, SAME_BITS, sentence, [], 0, 0.0, None, line["sha256"])
    level = ledger.record(question, "begun", claims=True, **facts)["level"]
    if trains:
        study.train(seeds or MOST, until, budget, level)
    study.read()
    study.look()
    comparison = study.compare(level, until or 0.0)
    line = ledger.record(
        question, comparison.verdict, claims=True, pairs=comparison.estimate.pairs, **facts
    )
    notes = [
        f"the bits differ: samewise diff {differing[0].path} {differing[1].path}"
        if differing
        else "the bits were not compared: no two runs with one seed are here",
        f"try {line['try']}: its claim is false in at most {100 * level:.2g} %, and any claim of "
        f"this ledger in at most {100 * LEVEL:.0f} %",
        *comparison.notes,
    ]
    return Verdict(
        comparison.verdict == "better",
        comparison.verdict,
        str(comparison),
        notes,
        line["try"],
        level,
        comparison,
        line["sha256"],
    )


def _compare_bits(
    proposal: Side, baseline: Side
) -> tuple[list[int], tuple[RunFolder, RunFolder] | None]:
    """Return the seeds whose runs have the same bits, and the first two runs that differ."""
    runs, values, equal = (
        [side.folders() for side in (proposal, baseline)],
        [side.values() for side in (proposal, baseline)],
        list[int](),
    )
    for seed in sorted(runs[0].keys() & runs[1].keys() & values[0].keys() & values[1].keys()):
        pair = runs[0][seed], runs[1][seed]
        if not two_runs.compare(*pair).same:
            return equal, pair
        equal.append(seed)
    return equal, None


def _pairs(seeds: Sequence[int]) -> str:
    return f"{number_of(len(seeds), 'pair')} (seed {', '.join(map(str, seeds))})"
