"""Settings of `dflash doctor`. Imports nothing heavy."""

from dataclasses import dataclass

from dflash.config import setting


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What to look at beside the machine itself."""

    path: str = setting(".", "A folder on the disk that will hold the store.", positional=True)
