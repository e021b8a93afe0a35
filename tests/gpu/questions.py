"""Answers questions about speed in one go, in order of importance, each script in a process of its own, until the time is up.

    python tests/gpu/questions.py --seconds 560 --out FOLDER [--device cpu] [QUESTION...]

A question is a script, or a part of one: `resnet50`, `cifar10:graphs`. What each printed is in a file of its name in FOLDER, what it warned of in errors.txt.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUESTIONS = {
    "resnet50:strict": 240,
    "cifar10:plain": 45,
    "recipes:detection": 70,
    "recipes:vocoder": 60,
    "cifar10:graphs": 80,
    "resnet50:costs": 120,
    "large:recomputed": 60,
    "recipes:classification": 100,
    "resnet50:settings": 100,
    "recipes:speech_recognition": 90,
    "recipes:separation": 90,
    "cifar10:profiles": 60,
    "resnet50:lightning": 60,
    "large:untraced": 40,
    "cifar10:workers": 40,
    "large:kept": 40,
    "resnet50:searched": 200,
}
"""Those asked if none is named, and how many seconds each may take at most."""
LEAST_S = 20
"""What is left must be at least this for a question to be begun."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end, told = time.monotonic() + args.seconds, list[str]()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1] / ".package"), os.environ.get("PYTHONPATH")]))}
    for question in args.questions or QUESTIONS:
        script, _, part = question.partition(":")
        left = end - time.monotonic()
        if left < LEAST_S:
            told.append(f"{question}: not begun")
            continue
        began = time.monotonic()
        command = [sys.executable, HERE / f"{script}.py", "--device", args.device, *(["--only", part] if part else [])]
        with open(args.out / f"{script}.txt", "ab") as out, open(args.out / "errors.txt", "ab") as errors:
            before = out.tell()
            try:
                # A group of its own, which is killed with its loader workers and compilers
                process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors, start_new_session=True)
                code = process.wait(min(left, QUESTIONS.get(question, left)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = "stopped"
        told.append(f"{question}: {time.monotonic() - began:.0f} s{f', {code}' if code else ''}")
        print((args.out / f"{script}.txt").read_bytes()[before:].decode(), flush=True)
    print("; ".join(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
