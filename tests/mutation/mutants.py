"""How many small faults the default tests find: `make mutants`. Cosmic Ray makes the mutants, a fork for each runs the tests.

A mutant is the repository with one operator, number, condition, loop, handler or decorator changed. Each is tried with the tests named here for its file, the
quickest first, until one fails; all are among the default tests. A fork has torch imported already, which is most of what a test costs.
`explained.toml` says for some why no test can find them; an entry that is not (or no longer) a mutant is an error.

    python tests/mutation/mutants.py [--share 0.25] [--seed 0] [--out OUTCOMES] [FILE ...]
    python tests/mutation/mutants.py --again OUTCOMES        what survived, once more
"""

import argparse
import ast
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = Path(__file__).with_name("explained.toml")
STEPS, RESUMING, FAILURES = "tests/steps/test_steps.py", "tests/runner/test_resuming.py", "tests/runner/test_failures.py"
PARTS, SEVERAL, FROZEN = "tests/runner/test_parts_of_training.py", "tests/runner/test_several_optimizers.py", "tests/runner/test_frozen.py"
SUMS = ["tests/runner/test_tree_sum.py", STEPS]
CHECKPOINTS = ["tests/runner/test_checkpoint_writing.py", "tests/runner/test_checkpoints.py"]
OPTIM = ["tests/runner/test_optimizers.py", "tests/runner/test_optimizer_states.py", "tests/runner/test_param_groups.py"]
INITIAL = ["tests/runner/test_initialise.py", "tests/runner/test_initial_weights.py", "tests/runner/test_weight_files.py"]
SCHEDULES = ["tests/runner/test_schedules.py"]
HELD = [f"{FROZEN}::{name}" for name in ("test_a_layer_keeps_its_statistics_only_if_it_is_frozen_as_a_whole", "test_invalid_frozen_settings_are_refused")]
TRACED = [f"{SEVERAL}::{name}" for name in ("test_a_trace_of_every_third_step_equals_a_full_one_there", "test_the_trace_digests_the_gradients_of_every_phase")]
TESTS = {
    "training/loop.py": [PARTS, *TRACED, STEPS, SEVERAL, RESUMING, FAILURES],
    **{f"training/{name}.py": [PARTS, STEPS, RESUMING] for name in ("run", "losses", "recorder", "state", "batches")},
    "training/phase.py": [PARTS, STEPS],
    "training/guards/finite.py": [PARTS, "tests/runner/test_ema.py"],
    "training/readings.py": [PARTS, SEVERAL, "tests/runner/test_ema.py", STEPS],
    "strategies/tree.py": SUMS,
    "strategies/replicas.py": [*SUMS, "tests/runner/test_any_number_of_ranks.py"],
    "strategies/packing.py": ["tests/runner/test_sharding.py"],
    "records/checkpoint.py": [*CHECKPOINTS, "tests/security/test_pickles.py", RESUMING],
    "records/kept_checkpoints.py": [*CHECKPOINTS, RESUMING],
    "records/checkpoint_writer.py": [*CHECKPOINTS, RESUMING],
    "data/streams.py": ["tests/runner/test_keyed.py"],
    "data/plan.py": ["tests/runner/test_plan_and_order.py"],
    "optim/build.py": OPTIM,
    "optim/states.py": OPTIM,
    "optim/groups.py": [*OPTIM[::-1], *HELD],
    "optim/matching.py": [*OPTIM[::-1], INITIAL[0]],
    "optim/initialise.py": INITIAL,
    "optim/frozen.py": [*HELD, FROZEN],
    "optim/weights.py": INITIAL[::-1],
    "optim/parametrise.py": INITIAL[:2],
    **{f"optim/schedules/{name}.py": SCHEDULES for name in ("base", "decay", "warmup", "one_cycle", "combine", "plateau", "adapter")},
}
"""Files below runner/, and the tests that should find faults in them, the quickest first."""

OPERATORS = (
    *(
        f"ReplaceBinaryOperator_{pair}"
        for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul", "LShift_RShift", "BitOr_BitAnd")
    ),
    *(
        f"ReplaceComparisonOperator_{pair}"
        for pair in ("Eq_NotEq", "NotEq_Eq", "Lt_GtE", "Lt_LtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt", "Is_IsNot", "IsNot_Is")
    ),
    *(f"ReplaceUnaryOperator_Delete_{kind}" for kind in ("USub", "Invert", "Not")),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ExceptionReplacer", "NumberReplacer", "RemoveDecorator", "ZeroIterationForLoop"),
)
"""Some of Cosmic Ray's operators: one or two changes for each place, where it has a dozen."""

LIMIT_S = 300
"""A mutant that hangs for this long counts as found."""


@dataclass(frozen=True)
class Mutant:
    """One changed file."""

    file: str
    operator: str
    line: int
    source: str
    change: str


def mutants(file: str) -> list[Mutant]:
    """All of a file, less those that change only annotations or what `Final` marks as text."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    original = (ROOT / "runner" / file).read_text()
    found, known = list[Mutant](), {_meaning(original)}
    for name in OPERATORS:
        for occurrence in itertools.count():
            try:
                source = mutate_code(original, get_operator(f"core/{name}")(), occurrence)
                if source is None:
                    break
                meaning = _meaning(source)
            except (SyntaxError, AttributeError):  # no program any more; a dotted exception's name, which Cosmic Ray cannot replace
                continue
            if meaning not in known:
                known.add(meaning)
                pairs = zip(original.splitlines(), source.splitlines(), strict=False)
                line, change = next(((number, after) for number, (before, after) in enumerate(pairs, 1) if before != after), (0, ""))
                found.append(Mutant(file, name, line, source, change.strip()))
    return found


def _meaning(source: str) -> str:
    """The syntax tree without what changes nothing in a program that runs: annotations (they stay text here), docstrings, and `final`, which marks classes
    for type checkers; and whether an argument may be given by its place, since Cosmic Ray takes the bare `*` of a signature for an operator."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = [one for one in node.decorator_list if not (isinstance(one, ast.Name) and one.id == "final")]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.arguments):
            before = [*node.posonlyargs, *node.args]
            node.kw_defaults = [*[None] * (len(before) - len(node.defaults)), *node.defaults, *node.kw_defaults]
            node.posonlyargs, node.args, node.kwonlyargs, node.defaults = [], [], [*before, *node.kwonlyargs], []
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(0)
    return ast.dump(tree)


def _try(copy: Path, tests: list[str], said: Path) -> None:
    """In a fork: run the tests on the copy of the repository; exit code 1 where one fails."""
    os.setsid()
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy / ".package")
    sys.path.insert(0, str(copy / ".package"))
    import pytest

    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-m", "not slow", f"--rootdir={copy}", *tests])
    os._exit(int(code))


def found_by(mutant: Mutant, copy: Path) -> str | None:
    """The tests that find a mutant (a file, or `it hangs`); None where it survives."""
    target = copy / "runner" / mutant.file
    before = target.read_text()
    target.write_text(mutant.source)
    try:
        return next((failure for test in TESTS[mutant.file] if (failure := _failure(test, copy))), None)
    finally:
        target.write_text(before)


def _failure(test: str, copy: Path) -> str | None:
    """The file of tests, where one of them fails on the copy; `it hangs`; None where all pass."""
    fork = multiprocessing.get_context("fork").Process(target=_try, args=(copy, [test], copy / "said.txt"))
    fork.start()
    fork.join(LIMIT_S)
    hangs = fork.is_alive()
    _end(fork.pid)
    fork.join()
    return "it hangs" if hangs else test if fork.exitcode else None


def _failing(tests: list[str], copy: Path) -> list[str]:
    """Those that fail, and those that take so long that every mutant would be found."""
    return [test if failure == test else f"{test}: {failure}, or takes more than {LIMIT_S} s here" for test in tests if (failure := _failure(test, copy))]


def _end(session: int | None) -> None:
    """End what a fork has started, and itself."""
    try:
        os.killpg(session or 0, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="below runner/; default: all that are named here")
    parser.add_argument("--share", type=float, default=1.0, help="try this share of the mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="keep every mutant's outcome here, a line of JSON each, written as they come")
    parser.add_argument("--again", type=Path, default=None, metavar="OUTCOMES", help="try those that survived there, and count both times together")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    import hypothesis  # noqa: F401 (what every fork would import for itself)
    import omegaconf  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torchvision  # noqa: F401

    torch.set_num_threads(1)
    before = [json.loads(line) for line in given.again.read_text().splitlines()] if given.again else []
    files = given.files or [file for file in TESTS if not before or any(one["file"] == file for one in before)]
    before = [one for one in before if one["file"] in files]
    made = [mutant for file in files for mutant in mutants(file)]
    if stale := _stale(files, made):
        print(f"{EXPLAINED.name} explains what is no mutant:", *stale, sep="\n  ")
        return 1
    tried = _survivors(before, made) if given.again else random.Random(given.seed).sample(made, max(1, round(given.share * len(made))))
    print(f"{len(made)} mutants of {len(files)} files, {len(tried)} of them tried", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        copies = [Path(temporary) / str(number) for number in range(given.jobs)]
        for copy in copies:
            shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
        needed = list(dict.fromkeys(test for file in files for test in TESTS[file]))
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("fork")) as at_once:
            shares = list(at_once.map(_failing, [needed[number :: given.jobs] for number in range(given.jobs)], copies))
        if broken := [test for share in shares for test in share]:
            print("the tests fail without a mutant:", *broken, sep="\n  ")
            return 1
        forks = multiprocessing.get_context("fork")
        out = (given.out or Path(temporary) / "outcomes.jsonl").absolute()
        out.write_text("")
        workers = [forks.Process(target=_work, args=(tried[number :: given.jobs], copy, out)) for number, copy in enumerate(copies)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        outcomes = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(outcomes) == len(tried)
    _report(files, outcomes, before)
    return 0


def _explained() -> dict[str, dict[str, str]]:
    """By file and the changed line: why no test can find it."""
    return tomllib.loads(EXPLAINED.read_text())


def _stale(files: list[str], made: list[Mutant]) -> list[str]:
    """What is explained and is no mutant."""
    there = {(mutant.file, mutant.change) for mutant in made}
    return [f"runner/{file}: {change}" for file, reasons in _explained().items() for change in reasons if file in files and (file, change) not in there]


def _survivors(before: list[dict[str, Any]], made: list[Mutant]) -> list[Mutant]:
    """Those that survived an earlier time and can still be made, each at the nearest line: the file may have changed."""
    tried: list[Mutant] = []
    for one in before:
        if one["found by"] is None:
            alike = [mutant for mutant in made if (mutant.file, mutant.operator, mutant.change) == (one["file"], one["operator"], one["change"])]
            tried += sorted(alike, key=lambda mutant: abs(mutant.line - one["line"]))[:1]
    return tried


def _work(share: list[Mutant], copy: Path, out: Path) -> None:
    """Try some mutants on a copy of the repository, and note what became of each, a line of JSON each."""
    for mutant in share:
        begun = time.monotonic()
        killer = found_by(mutant, copy)
        outcome = {"file": mutant.file, "line": mutant.line, "operator": mutant.operator, "change": mutant.change, "found by": killer}
        with out.open("a") as file:
            file.write(json.dumps({**outcome, "seconds": round(time.monotonic() - begun, 1)}) + "\n")


def _report(files: list[str], outcomes: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Print what was found, and each survivor; after `before`, of which these are the survivors, both together."""
    reasons = _explained()
    for file in files:
        mine = [outcome["found by"] for outcome in outcomes if outcome["file"] == file]
        if mine:
            print(f"{file:32} {sum(map(bool, mine)):4} of {len(mine):4} found")
    survivors = sorted((one for one in outcomes if one["found by"] is None), key=lambda one: (one["file"], one["line"]))
    for one in survivors:
        reason = reasons.get(one["file"], {}).get(one["change"])
        print(
            f"{'explained' if reason else 'survives'}: runner/{one['file']}:{one['line']} ({one['operator']}): {one['change']}", f"    {reason or ''}".rstrip()
        )
    for one in outcomes:
        if one["found by"] is not None and one["change"] in reasons.get(one["file"], {}):
            print(f"found, so there is nothing to explain: runner/{one['file']}:{one['line']}: {one['change']}")
    explained = sum(one["change"] in reasons.get(one["file"], {}) for one in survivors)
    found = len(outcomes) - len(survivors)
    if before:
        earlier = sum(one["found by"] is not None for one in before)
        gone = len(before) - earlier - len(outcomes)
        print(f"tried {len(before)}: {earlier} found before, {found} now, {gone} no longer possible; {explained} explained, {len(survivors) - explained} left")
        print(f"found: {earlier + found} of {len(before) - gone}, {100 * (earlier + found) / (len(before) - gone):.1f} %")
    else:
        print(f"found: {found} of {len(outcomes)}, {100 * found / len(outcomes):.1f} %; {explained} of the others explained")


if __name__ == "__main__":
    sys.exit(main())
