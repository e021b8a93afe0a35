"""`python -m samewise` is the `samewise` command."""

from samewise.runner.cli import entry

if __name__ == "__main__":
    entry()
