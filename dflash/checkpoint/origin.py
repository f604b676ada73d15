"""Where a drafter comes from: the target it was trained for, on what text, and what a layout has no field for.

It lies under the key `dflash` of config.json, which other loaders ignore. A drafter of another tool has none; it is
then trusted as far as its shape goes.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import DflashError

KEY = "dflash"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Fingerprints are those of store.json; an empty one is unknown (data that came as tokens has no tokenizer)."""

    target: str  # its name
    architectures: tuple[str, ...] = ()
    config: str = ""
    weights: str = ""
    num_target_layers: int
    tokenizer: str = ""
    template: str = ""
    template_args: dict[str, Any] = field(default_factory=dict)
    embed_factor: float = 1.0  # on anchor and mask rows, as the target's family has it
    softcap: float | None = None
    logit_scale: float = 1.0
    step: int | None = None  # optimiser step of the checkpoint

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"architectures": list(self.architectures)}

    @staticmethod
    def from_json(document: dict[str, Any], path: Path) -> "Origin | None":
        """The origin in a drafter's config.json; None where another tool wrote it."""
        found = document.get(KEY)
        if found is None:
            return None
        try:
            return Origin(**(found | {"architectures": tuple(found.get("architectures", ()))}))
        except (TypeError, AttributeError) as error:
            raise DflashError(f"{path}: the field {KEY} is damaged ({error}); export the drafter again.") from None
