"""The commands. Each imports its stage when it runs, hands over its configs and returns the function's dict."""

import dataclasses
import platform
from importlib import metadata
from typing import Any

import click

import dflash
from dflash import present
from dflash.cli.options import ConfigCommand, Result
from dflash.config import REQUIRED, setting
from dflash.data.config import DataConfig, RegenerateConfig
from dflash.doctor.config import DoctorConfig
from dflash.evaluate.config import EvalConfig
from dflash.extract.config import ExtractConfig
from dflash.report.config import ReportConfig
from dflash.train.config import ExportConfig, TrainConfig

LIBRARIES = ("torch", "transformers", "zarr", "numcodecs", "numpy")


def _print_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    found = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    click.echo(f"dflash {dflash.__version__} ({', '.join(found)})")
    ctx.exit()


class Group(click.Group):
    """Lists its commands in the order of the work, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    "dflash",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExample, the two stages:\n"
    "  dflash extract --target MODEL --data chats.jsonl --store /nvme/store\n"
    "  dflash train --store /nvme/store --run runs/first\n\n"
    "`dflash COMMAND -h` explains a command.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the versions."
)
def cli() -> None:
    """Train the drafter that makes a large language model answer several times faster (DFlash)."""


def command(name: str, *configs: type, brief: str, example: str) -> Any:
    """Register a command on the group: its configs, its line in `dflash -h`, its example, its screen for people."""
    screen = getattr(present, name.replace("-", "_"))
    return cli.command(name, cls=ConfigCommand, configs=configs, present=screen, short_help=brief, example=example)


@command(
    "regenerate",
    RegenerateConfig,
    brief="Have the target answer prompts itself.",
    example="dflash regenerate --data prompts.jsonl --target MODEL --out answers.jsonl --max-new-tokens 512",
)
def regenerate(config: RegenerateConfig) -> Result:
    """Have the target answer prompts itself: a drafter learns best from its target's own words."""
    from dflash.data.regenerate import regenerate

    return regenerate(config)


@command(
    "extract",
    ExtractConfig,
    DataConfig,
    brief="Stage 1: conversations through the target to a store.",
    example="dflash extract --target MODEL --data chats.jsonl --store /nvme/store",
)
def extract(config: ExtractConfig, data: DataConfig) -> Result:
    """Stage 1: run the target once over conversations and write its hidden states to a store.

    On a store that exists it makes the shards that are missing.
    """
    from dflash.data.prepare import prepare
    from dflash.data.sources import data_fingerprint
    from dflash.extract.run import extract

    return extract(config, data, prepare, data_fingerprint)


@command(
    "train",
    TrainConfig,
    brief="Stage 2: a drafter from a store.",
    example="dflash train --store /nvme/store --run runs/first --epochs 6",
)
def train(config: TrainConfig) -> Result:
    """Stage 2: train a drafter from a store; the target is not needed.

    The same line again goes on where the run stopped.
    """
    from dflash.train.run import train

    return train(config)


@command(
    "export",
    ExportConfig,
    brief="Write a drafter as servers load it.",
    example="dflash export runs/first --out drafter",
)
def export(config: ExportConfig) -> Result:
    """Write a drafter in a public layout that a server loads."""
    from dflash.train.export import export

    return export(config)


@command(
    "eval",
    EvalConfig,
    brief="Acceptance length, speed-up, same output or not.",
    example="dflash eval --drafter drafter --target MODEL --prompts prompts.jsonl --limit 50",
)
def evaluate(config: EvalConfig) -> Result:
    """Decode prompts with and without the drafter: acceptance length, speed, and whether the output is the same."""
    from dflash.data.prompts import read_prompts, render_prompt
    from dflash.evaluate.run import evaluate

    return evaluate(config, read_prompts, render_prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """What of a shard to show."""

    shard: str = setting(REQUIRED, "A shard's folder, or a store.", positional=True)
    row: int | None = setting(None, "Show this row of the shard.")
    text: bool = setting(False, "Show the text, its supervised part in colour.")
    verify: bool = setting(False, "Read everything and check it against the checksums.")


@command(
    "inspect-shard",
    InspectConfig,
    brief="Show what a shard or a store holds.",
    example="dflash inspect-shard store/shards/b1216/s000007.zarr --row 0 --text",
)
def inspect_shard(config: InspectConfig) -> Result:
    """Show what a shard or a store holds: shapes, documents, norms of the taps, checksums, text.

    With --verify the exit code is 1 while there are problems.
    """
    from dflash.store import inspect

    result = inspect(config.shard, row=config.row, text=config.text, verify=config.verify)
    return {"ok": result["checksums"]["ok"], **result} if config.verify else result


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """How to check a store, and whether to mend it."""

    store: str = setting(REQUIRED, "The store.", positional=True)
    repair: bool = setting(False, "Retire damaged shards, so that `dflash extract` makes them again.")
    rebuild_index: bool = setting(False, "Write the index anew from the shards on disk.")


@command("verify", VerifyConfig, brief="Check every checksum of a store.", example="dflash verify /nvme/store")
def verify(config: VerifyConfig) -> Result:
    """Check a store: every checksum, the index against the disk, the plan against the index.

    Leaves with exit code 1 while there are problems.
    """
    from dflash.store import verify

    return verify(config.store, repair=config.repair, rebuild_index=config.rebuild_index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Which store to pack, and where to."""

    store: str = setting(REQUIRED, "The store.", positional=True)
    out: str = setting(REQUIRED, "The folder to write the packed store to.", positional=True)


@command(
    "pack",
    PackConfig,
    brief="Copy a store without holes, for tar and object stores.",
    example="dflash pack /nvme/store /nvme/packed",
)
def pack(config: PackConfig) -> Result:
    """Write the same store without the holes of its files, which tar and object stores would write out as zeros.

    What is packed is a store like the other: `dflash train` and `dflash verify` take it, zarr-python opens it. The same
    line again goes on where it stopped.
    """
    from dflash.store import pack

    return pack(config.store, config.out)


@command(
    "report",
    ReportConfig,
    brief="Charts and tables of runs and stores, as one page.",
    example="dflash report runs/first",
)
def report(config: ReportConfig) -> Result:
    """Show runs side by side, and stores, as one HTML page with its charts as PNG files.

    Results of `dflash eval --json` that lie in RUN/eval/NAME.json appear as evaluation set NAME.
    """
    from dflash.report.build import report

    return report(config)


@command("doctor", DoctorConfig, brief="What this machine can do, in ten seconds.", example="dflash doctor /nvme")
def doctor(config: DoctorConfig) -> Result:
    """Look at this machine before a long run does: libraries, GPU, compilation, pinned memory, disk.

    Leaves with exit code 1 where something will stop a stage.
    """
    from dflash.doctor.checks import doctor

    return doctor(config)
