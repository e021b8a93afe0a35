"""`python -m samewise` is the `samewise` command."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # a file in the current folder must not take the place of a module; a project's folder comes last
    del sys.path[0]

from samewise.runner.cli import entry

if __name__ == "__main__":
    entry()
