"""store.json: what the states are and what they were made from. Written last when a store is made, and never changed.

`StoreMeta` is the file's content without its own crc32c. Fingerprints of the data, tokenizer, template and target come
from the stages; those of plan, docs and target/ are taken by `create_store`.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash.errors import DflashError
from dflash.files import canonical_json, sha256_json
from dflash.store import checks, layout
from dflash.store.layout import ArraySpec, Bucket, array_specs, check_labels, crc32c
from dflash.store.paths import DOCS, PLAN, STORE_JSON, TARGET, read_inside

TARGET_FIELDS = ("name", "config", "weights", "dtype")


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """The fields of store.json; `fingerprints` has plan (sha256 of its content), plan_file ({bytes, sha256}), docs
    and target ({file: {bytes, sha256}})."""

    format: int = layout.FORMAT_VERSION
    target: dict[str, str]
    tokenizer: str
    template: str
    template_args: dict[str, Any] = field(default_factory=dict)
    data: str
    taps: tuple[int, ...]
    tap_convention: str = layout.TAP_CONVENTION
    hidden_size: int
    vocab_size: int
    storage: str = "bf16"
    labels: str = "argmax"
    seed: int = 0
    buckets: tuple[Bucket, ...]
    fingerprints: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object with its crc32c: over the canonical JSON (sorted keys, no spaces) of all other fields."""
        return with_crc(json.loads(json.dumps(asdict(self))))

    def encode(self) -> bytes:
        """The file's bytes."""
        return (canonical_json(self.to_json()) + "\n").encode()

    @staticmethod
    def from_json(value: Any, where: str = STORE_JSON) -> "StoreMeta":
        return _from_json(value, where)

    def specs(self, ceiling: int) -> dict[str, ArraySpec]:
        return array_specs(
            ceiling=ceiling, hidden_size=self.hidden_size, taps=len(self.taps), storage=self.storage, labels=self.labels
        )

    def known_files(self) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
        """(steps from the root, {bytes, sha256}) of every file whose content is fixed here."""
        docs, target = ((top, self.fingerprints[top].items()) for top in (DOCS, TARGET))
        inside = [((top, *name.split("/")), about) for top, files in (docs, target) for name, about in files]
        return [*inside, ((PLAN,), self.fingerprints["plan_file"])]

    def identity(self) -> dict[str, Any]:
        """What two runs must share to fill one store: all but names, paths and counts."""
        value = json.loads(json.dumps(asdict(self)))
        del value["counts"]
        value["target"].pop("name")
        return value

    def fingerprint(self) -> str:
        """Binds every shard to its store."""
        return sha256_json(self.identity())


def differences(old: StoreMeta, new: StoreMeta) -> list[tuple[str, Any, Any]]:
    """(field, old, new) of what keeps `new` from filling the store of `old`; fingerprints that `new` has not taken
    yet are left out, and so are names."""
    before, after = old.identity(), new.identity()
    found = []
    for name in before:
        one, other = before[name], after[name]
        if type(one) is dict and name in ("target", "fingerprints"):
            keys = sorted(one.keys() & other.keys() if name == "fingerprints" else one.keys() | other.keys())
            found += [(f"{name}.{k}", one.get(k), other.get(k)) for k in keys if one.get(k) != other.get(k)]
        elif one != other:
            found.append((name, one, other))
    return found


def check_same(old: StoreMeta, new: StoreMeta, root: Path) -> None:
    """Refuse to fill a store with what differs from what it holds, naming the field, the old and the new value."""
    for name, one, other in differences(old, new):
        raise DflashError(
            f"Store {root} was made with another {name}: it has {_short(one)}, this command has {_short(other)};"
            " give the store's own value, or another --store."
        )


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 120 else text[:117] + "..."


def with_crc(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "crc32c": crc32c(canonical_json(value).encode())}


def check_crc(value: Any, where: str) -> dict[str, Any]:
    """A JSON object without its `crc32c` field, which must be right."""
    if type(value) is not dict:
        raise DflashError(f"{where} is not a JSON object; restore it from a copy.")
    rest = {name: item for name, item in value.items() if name != "crc32c"}
    try:
        content = canonical_json(rest).encode()
    except ValueError as error:  # lone surrogates
        raise DflashError(f"{where} is damaged ({error}); restore it from a copy.") from None
    if value.get("crc32c") != crc32c(content):
        raise DflashError(
            f"{where} is damaged (the field 'crc32c' does not fit the other fields); restore it from a copy."
        )
    return rest


def read_meta(root: Path) -> StoreMeta:
    """store.json of a store."""
    where = f"{root}/{STORE_JSON}"
    try:
        content = read_inside(root, (STORE_JSON,), limit=1 << 26)
    except FileNotFoundError:
        raise DflashError(
            f"{root} is not a store: it has no {STORE_JSON}; make one with `dflash extract --store`."
        ) from None
    except NotADirectoryError:
        raise DflashError(f"{root} is not a folder, so it is no store; give one that `dflash extract` made.") from None
    meta = StoreMeta.from_json(parse_json(content, where), where)
    if content != meta.encode():
        raise DflashError(f"{where} is damaged (it is not spelled as dflash writes it); restore it from a copy.")
    return meta


def parse_json(content: bytes, where: str) -> Any:
    try:
        return checks.parse_shallow(content)
    except ValueError as error:
        raise DflashError(f"{where} is not valid JSON ({error}); restore it from a copy.") from None


FIELDS: dict[str, checks.Check] = {
    "format": checks.integer(0, 1 << 31),
    "target": checks.mapping,
    "tokenizer": checks.text,
    "template": checks.text,
    "template_args": checks.mapping,
    "data": checks.text,
    "taps": checks.list_of(checks.integer(0, 100_000), low=1, high=1024),
    "tap_convention": checks.text,
    "hidden_size": checks.integer(1, 1 << 20),
    "vocab_size": checks.integer(1, 1 << 31),
    "storage": checks.one_of(*layout.STORAGES),
    "labels": checks.text,
    "seed": checks.integer(-(1 << 63), 1 << 64),
    "buckets": checks.list_of(checks.mapping, low=1, high=4096),
    "fingerprints": checks.mapping,
    "counts": checks.mapping,
}
BUCKET_FIELDS: dict[str, checks.Check] = {
    "ceiling": checks.integer(1, layout.MAX_CEILING),
    "held_out": checks.boolean,
    "rows": checks.integer(0, layout.MAX_ROWS),
    "rows_per_shard": checks.integer(1, 1 << 20),
    "rows_per_forward": checks.integer(1, 1 << 20),
}
FILE_FIELDS: dict[str, checks.Check] = {"bytes": checks.integer(0, 1 << 50), "sha256": checks.text}
assert tuple(FIELDS) == tuple(f.name for f in fields(StoreMeta))


def _from_json(value: Any, where: str) -> StoreMeta:
    if type(value) is dict and type(value.get("format")) is int and value["format"] > layout.FORMAT_VERSION:
        raise DflashError(
            f"{where} has format {value['format']}, this dflash reads {layout.FORMAT_VERSION}; install a newer dflash."
        )
    found = checks.check_fields(check_crc(value, where), FIELDS, where)
    if found["format"] != layout.FORMAT_VERSION:
        raise DflashError(
            f"{where}: the field 'format' is {found['format']}, not {layout.FORMAT_VERSION}; restore it from a copy."
        )
    target_checks: dict[str, checks.Check] = dict.fromkeys(TARGET_FIELDS, checks.text)
    checks.check_fields(found["target"], target_checks, f"{where}: target", optional=("dtype",))
    buckets = tuple(
        Bucket(**checks.check_fields(item, BUCKET_FIELDS, f"{where}: buckets[{i}]"))
        for i, item in enumerate(found["buckets"])
    )
    if len({bucket.name for bucket in buckets}) != len(buckets):
        raise DflashError(f"{where}: the field 'buckets' names a bucket twice; restore it from a copy.")
    if len(set(found["taps"])) != len(found["taps"]):
        raise DflashError(f"{where}: the field 'taps' names a layer twice; restore it from a copy.")
    check_labels(found["labels"], where)
    _check_fingerprints(found["fingerprints"], where)
    meta = StoreMeta(**{**found, "taps": tuple(found["taps"]), "buckets": buckets})
    _check_sizes(meta, where)
    return meta


def _check_fingerprints(value: dict[str, Any], where: str) -> None:
    kinds: dict[str, checks.Check] = {
        "plan": checks.text,
        **dict.fromkeys(("plan_file", "docs", "target"), checks.mapping),
    }
    checks.check_fields(value, kinds, f"{where}: fingerprints")
    checks.check_fields(value["plan_file"], FILE_FIELDS, f"{where}: fingerprints.plan_file")
    for kind in ("docs", "target"):
        for name, entry in value[kind].items():
            checks.check_fields(entry, FILE_FIELDS, f"{where}: fingerprints.{kind}.{str(name)[:80]!r}")
            # a name here becomes a path below docs/ or target/, so it may not climb
            if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
                raise DflashError(
                    f"{where}: fingerprints.{kind} has the impossible file name {str(name)[:80]!r}; restore it "
                    "from a copy."
                )


def _check_sizes(meta: StoreMeta, where: str) -> None:
    """No array of a shard may be larger than what a file, or one blosc block, can hold."""
    for bucket in meta.buckets:
        for spec in meta.specs(bucket.ceiling).values():
            rows = min(bucket.rows_per_shard, max(bucket.rows, 1))
            if spec.file_bytes(rows) > 1 << 50 or (spec.packed and spec.chunk_bytes(rows) > 2**31 - 64):
                raise DflashError(
                    f"{where}: rows of {spec.name} in bucket {bucket.name} are too large; restore it from a copy."
                )
