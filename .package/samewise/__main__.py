"""`python -m samewise` is the `samewise` command."""

import os
import sys

# A file in the current folder must not take the place of a module; a project's folder comes last
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]


def main() -> None:
    """The console script."""
    try:
        _fix_order_of_sets()
        from samewise.runner.cli import entry
    except KeyboardInterrupt:
        sys.exit(3)
    entry()


def _fix_order_of_sets() -> None:
    """Start Python again with a fixed hash seed, which it reads only then: otherwise a set of
    strings in a user's code has another order in each process.
    """
    # A debugger would lose the process
    is_watched = sys.gettrace() or any(
        map(sys.monitoring.get_tool, range(6)) if hasattr(sys, "monitoring") else ()
    )
    if (
        os.environ.get("PYTHONHASHSEED") == "0"
        or sys.flags.ignore_environment
        or is_watched
        or not sys.executable
        or sys.argv[0] == "-"
    ):
        return
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
