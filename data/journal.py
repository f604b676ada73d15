"""The output of `regenerate` while it grows: answers are appended as they come, and put in order at the end.

OUT.part is in the order of finishing; each line names its prompt and sample, so a run that was stopped goes on where it
was, and a torn last line is written again. OUT itself appears whole, in the order of the prompts.
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash.errors import DflashError
from dflash.files import replacing

Key = tuple[int, int]  # number of the prompt, number of the sample


class Journal:
    """What is answered already, and where its line lies. `run` is the fingerprint of the settings that made it."""

    def __init__(self, out: Path, run: str) -> None:
        self.out, self.run = out, run
        self.part = out.with_name(out.name + ".part")
        self._where: dict[Key, tuple[Path, int]] = {}
        if not out.parent.is_dir():
            raise DflashError(f"{out.parent} is no folder, so {out.name} cannot be written there; make it first.")
        self._adopt(out)
        whole = self._adopt(self.part)
        self._file = self.part.open("ab")
        self._file.truncate(whole)  # what a kill left of the last line
        self._file.seek(whole)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self.part.exists() and not self.part.stat().st_size:
            self.part.unlink()

    def __contains__(self, key: Key) -> bool:
        return key in self._where

    def append(self, key: Key, record: dict[str, Any]) -> None:
        self._where[key] = (self.part, self._file.tell())
        self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> int:
        """Write all answers to OUT in the order of prompts and samples; return how many there are."""
        self._file.flush()
        keys = sorted(self._where)
        lines = [self._where[key] for key in keys]
        if lines and lines == sorted(lines, key=lambda line: line[1]) and {path for path, _ in lines} == {self.out}:
            return len(lines)  # nothing is new: OUT stays untouched
        readers = {path: path.open("rb") for path in {path for path, _ in lines}}
        try:
            with replacing(self.out) as sibling, sibling.open("wb") as output:
                for path, offset in lines:
                    readers[path].seek(offset)
                    output.write(readers[path].readline().rstrip(b"\n") + b"\n")
        finally:
            for reader in readers.values():
                reader.close()
        self.part.unlink()
        return len(lines)

    def _adopt(self, path: Path) -> int:
        """Remember the whole lines of a file; return where they end."""
        if not path.exists():
            return 0
        offset = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and path == self.part:
                    break
                try:
                    sampling = json.loads(raw)["sampling"]
                    key, run = (sampling["prompt"], sampling["sample"]), sampling["run"]
                except (ValueError, KeyError, TypeError):
                    raise DflashError(
                        f"{path}, line {number} was not written by dflash regenerate; give another --out or remove it."
                    ) from None
                if run != self.run:
                    raise DflashError(
                        f"{path} holds answers of another target, to other prompts or with other settings; "
                        "give another --out or remove it."
                    )
                self._where[key] = (path, offset)
                offset += len(raw)
        return offset
