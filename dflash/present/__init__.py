"""What a command did, as one screen for people: what was made, where, how fast, what limited it, the next command.

One function a command, `(result, *configs) -> text`, from the same dict that `--json` prints. Plain text within 80
columns: a terminal, a pipe and a log file show the same. A key that a result lacks leaves its line out.
"""

from dflash.present.doctor import doctor
from dflash.present.evaluation import eval
from dflash.present.report import report
from dflash.present.stages import export, extract, regenerate, train
from dflash.present.store import inspect_shard, pack, verify

__all__ = ["doctor", "eval", "export", "extract", "inspect_shard", "pack", "regenerate", "report", "train", "verify"]
