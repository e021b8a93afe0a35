"""Write a finished run into one file, with which anyone can train it again."""

import argparse
import shlex
import sys
from pathlib import Path

from samewise.runner.bundles import archive
from samewise.runner.commands import JSON, PROJECT, RUN_ROOT, project_from
from samewise.runner.records.files import require_writable
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise bundle 3f2a --out result.bundle                     config, code, versions, digests of the data, trace, result
  samewise bundle 3f2a --out result.bundle --with-weights      also the best and the last checkpoint

The file is a tar archive; the same run always gives the same bytes. The command prints its identity, the SHA-256 of its manifest.json, which lists the SHA-256
of every other part. The data, passwords and tokens, and files that look like secrets are left out. All other files of your packages are included: look through
them before you share the bundle.
"""

ARGUMENTS = {
    "run": {
        "metavar": "RUN",
        "help": "a finished run: its folder or name, the start of its fingerprint, or its MLflow "
        "run id",
    },
    "--out": {
        "type": Path,
        "required": True,
        "metavar": "FILE",
        "help": "the file to write; an existing file is not overwritten",
    },
    "--with-weights": {
        "action": "store_true",
        "help": "include the best and the last checkpoint, not only their digests",
    },
    "--no-data-hashes": {
        "action": "store_true",
        "help": "list the data's files by name and size, without reading them",
    },
    **RUN_ROOT,
    **PROJECT,
    **JSON,
}


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    # Before the work whose result could not be written
    if args.out.exists():
        raise archive.already_exists(args.out)
    require_writable("--out", args.out, file=True)
    project = project_from(args)
    folder = saved.find(args.run, run_root=args.run_root)
    from samewise.runner.bundles.contents import gather, outside_weights

    for key, path in outside_weights(saved.config_in(folder.config).whole).items():
        message = (
            f"{path} is not in the bundle: whoever reproduces it also needs this file, and "
            f"adds {key}=PLACE to `samewise reproduce`"
        )
        print(f"warning: {key}: {message}", file=sys.stderr)
    parts = gather(
        folder, project, with_weights=args.with_weights, hash_data=not args.no_data_hashes
    )
    identity = archive.write(args.out, parts)
    if args.json:
        print(to_json({"file": str(args.out), "identity": identity, "parts": len(parts)}))
        return 0
    print(f"wrote {args.out}: {len(parts)} parts, {args.out.stat().st_size / 1e6:.1f} MB")
    print(
        f"identity {identity}\nnext:\n  "
        f"{shlex.join(['samewise', 'reproduce', str(args.out), '--expect', identity])}"
    )
    return 0
