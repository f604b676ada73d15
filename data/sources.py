"""Where lines come from: a JSONL file, or a Hugging Face dataset by name, with a digest of all that was read."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dflash.errors import DflashError, cause
from dflash.files import sha256_file, sha256_json


class Source(Protocol):
    """One entry of --data. `lines` gives (number from 1, bytes); `count` and `digest` hold once they have been read."""

    name: str
    count: int

    def lines(self) -> Iterator[tuple[int, bytes]]: ...

    def digest(self) -> str: ...


class JsonlFile:
    """A file, read as bytes so that only b"\\n" ends a line: JSON texts may hold other separators."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self.count = 0
        self._hash = hashlib.sha256()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._path.open("rb") as file:
                for raw in file:
                    self.count += 1
                    self._hash.update(raw)
                    yield self.count, raw
        except OSError as error:
            raise DflashError(f"{self.name} cannot be read ({error.strerror}); give a file that can be.") from error

    def digest(self) -> str:
        return self._hash.hexdigest()


class HubDataset:
    """The `train` split of a dataset that the optional package `datasets` finds; a row counts as a line."""

    def __init__(self, name: str, datasets: Any) -> None:
        self.name = name
        self._datasets = datasets
        self.count = 0
        self._hash = hashlib.sha256()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            rows = self._datasets.load_dataset(self.name, split="train", streaming=True)
        except Exception as error:  # `datasets` raises a dozen types for one fact
            raise DflashError(
                f"{self.name} is no file, and `datasets` cannot load it either ({cause(error)}); give a JSONL file."
            ) from error
        for row in rows:
            self.count += 1
            # A dataset fills absent fields with null; absent is what they mean.
            present = {key: value for key, value in row.items() if value is not None}
            raw = (json.dumps(present, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
            self._hash.update(raw)
            yield self.count, raw

    def digest(self) -> str:
        return self._hash.hexdigest()


def open_source(name: str) -> Source:
    """The file or dataset of that name."""
    path = Path(name)
    if path.is_dir():
        raise DflashError(f"{name} is a folder; name the JSONL files in it.")
    if path.exists():
        return JsonlFile(path)
    if path.suffix in (".jsonl", ".json", ".txt", ".gz") or name.startswith(("/", ".")):
        raise DflashError(f"{name} does not exist; give a file that does.")
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise DflashError(
            f"{name} does not exist; if it names a Hugging Face dataset, install the package `datasets`."
        ) from error
    return HubDataset(name, datasets)


def data_fingerprint(paths: tuple[str, ...]) -> str:
    """What `prepare` records as the data's fingerprint, without parsing anything. A file's name does not count."""
    return combine_digests([_digest(open_source(path)) for path in paths])


def _digest(source: Source) -> str:
    if isinstance(source, JsonlFile):
        return sha256_file(Path(source.name))
    for _ in source.lines():
        pass
    return source.digest()


def combine_digests(digests: list[str]) -> str:
    return sha256_json(digests)
