"""Processor time per step of `reproducibility=portable` against strict, as ratios within one run.

    make bench        or: python tests/benchmarks/bench_portable.py [WORK...]

The work of `bench_threads.py` with one thread on one core, in three processes that take turns of one step: portable, strict, and strict without AVX-512,
as it is on most CPUs. The ratio is the median over the turns.
"""

import statistics
import sys
from collections.abc import Callable

from bench_threads import WORK, Trainer

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
TURNS = 12


def main(wanted: list[str], say: Callable[[str], None] = print) -> None:
    say(f"{'work':<42} {'strict':>10}  portable to strict, to strict with no more than AVX2")
    for name, work in WORK.items():
        if wanted and not any(word in name for word in wanted):
            continue
        overrides = [*work, "reproducibility.threads=1"]
        strict, narrow = Trainer(overrides, 1), Trainer(overrides, 1, AVX2)
        portable = Trainer([*overrides, "reproducibility=portable"], 1)
        turns = [[float(trainer.ask("step").split()[1]) for trainer in (strict, narrow, portable)] for _ in range(TURNS + 2)][2:]
        for trainer in (strict, narrow, portable):
            trainer.end()
        to_strict, to_narrow = (statistics.median(turn[2] / turn[other] for turn in turns) for other in (0, 1))
        say(f"{name:<42} {statistics.median(turn[0] for turn in turns) * 1000:>7.0f} ms  {to_strict:>8.2f} {to_narrow:>8.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
