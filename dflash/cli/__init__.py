"""The command line: `dflash COMMAND`, also `python -m dflash COMMAND`.

Each command parses its flags into config dataclasses, calls one function and prints its result: as one JSON object with
`--json`, else as one screen for people. Only config modules are imported here, and a stage when its command runs, so
that `dflash --help` answers at once.
"""

from dflash.cli.commands import cli

__all__ = ["cli", "main"]


def main() -> None:
    cli(prog_name="dflash")
