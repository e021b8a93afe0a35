"""The tables of docs/gallery.md: finished runs, and what the headers of other experiments say was measured.

python tests/docs/gallery.py                    print them, with the runs that are in the page
python tests/docs/gallery.py --write RUN_ROOT   put them into the page, with the finished runs of a folder
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"
BEGIN, END = "<!-- {}: python tests/docs/gallery.py --write RUN_ROOT -->\n", "<!-- /{} -->"
NOT_MEASURED = re.compile(r"not repeated here|depends on your data", re.I)


def file_of(experiment: str) -> Path:
    return ROOT / "configs" / "experiment" / f"{experiment}.yaml"


def header(experiment: str) -> dict[str, str]:
    """The parts of the comment above an experiment: its `Title`, its `Result` and `Hardware` if it has them."""
    lines = file_of(experiment).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.removeprefix("#") for line in lines[1 : next(place for place, line in enumerate(lines) if not line.startswith("#"))])
    parts = re.findall(r"^ (\w+):\s+(.*(?:\n {3,}.*)*)", text, re.M)
    return {"Title": text.partition("\n")[0].strip(), **{name: " ".join(words.split()) for name, words in parts}}


def linked(experiment: str) -> str:
    """An experiment's name, with a link to its file."""
    return f"[`{experiment}`](../{file_of(experiment).relative_to(ROOT)})"


def of_runs(run_root: Path) -> list[list[str]]:
    """A row for each finished run of an experiment."""
    command = [sys.executable, "-m", "samewise", "runs", "--json", "--where", "state=finished", "--run-root", str(run_root)]
    rows = list[list[str]]()
    for run in json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout):
        folder, experiment, monitor = Path(run["folder"]), run["name"], run["monitor"]
        if not file_of(experiment).is_file():
            continue  # of a project of the user's
        summary, environment = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "environment"))
        cpu, threads = environment["cpu"], environment["threads"]
        rows.append(
            [
                linked(experiment) + (f" `{run['label']}`" if run["label"] else ""),
                *(header(experiment)["Title"], f"{monitor} {summary['metrics']['final'][monitor]:.4f}"),
                f"{run['seconds']:.0f} s, {run['steps']} steps",
                f"{cpu['model']} ({cpu['capability']}), {threads} thread{'s' * (threads > 1)}",
                f"`{summary['weights_sha256'][:16]}`",
            ]
        )
    return sorted(rows)


def of_headers(left_out: Iterable[str]) -> list[list[str]]:
    """A row for each other experiment that was trained to its end."""
    rows = list[list[str]]()
    for path in sorted((ROOT / "configs" / "experiment").glob("*.yaml")):
        parts = header(path.stem)
        if path.stem not in left_out and "Result" in parts and not NOT_MEASURED.search(parts["Result"]):
            rows.append([linked(path.stem), parts["Title"], parts["Result"], parts["Hardware"]])
    return rows


def in_page() -> list[list[str]]:
    """The rows of runs that the page has."""
    lines = PAGE.read_text(encoding="utf-8").partition(BEGIN.format("runs"))[2].partition(END.format("runs"))[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def written(page: str, runs: list[list[str]]) -> str:
    """The page with its tables made again."""
    headers = of_headers({row[0].split("`")[1] for row in runs})
    tables = {
        "runs": [["experiment", "task and data", "metric after the last step", "time", "machine", "weights' SHA-256"], *runs],
        "headers": [["experiment", "task and data", "result", "time and machine"], *headers],
    }
    for name, (head, *rows) in tables.items():
        before, _, rest = page.partition(BEGIN.format(name))
        text = "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))
        page = before + BEGIN.format(name) + text + END.format(name) + rest.partition(END.format(name))[2]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="RUN_ROOT")
    args = parser.parse_args()
    page = written(PAGE.read_text(encoding="utf-8"), of_runs(args.write) if args.write else in_page())
    if args.write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
