"""The manifest of a shard: the attributes of its Zarr group. Says what the shard is and carries every row's checksum.

It holds nothing that depends on who wrote the shard or when, so shards made again are equal byte for byte. The chain
of trust: an index line has the crc32c of the manifest's file, the manifest those of the rows.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.errors import DflashError
from dflash.files import allocated_bytes
from dflash.store import checks
from dflash.store.index import BAD_FIELDS, CRC, MAX_GENERATION
from dflash.store.layout import FORMAT_VERSION, ArraySpec, Shard, shard_text
from dflash.store.meta import check_crc, parse_json, with_crc
from dflash.store.paths import read_inside, shard_parts
from dflash.store.zarr_json import group_document

if TYPE_CHECKING:
    from dflash.store.store import Store

MANIFEST_FIELDS: dict[str, checks.Check] = {
    "format": checks.one_of(FORMAT_VERSION),
    "store": checks.text,
    "plan": checks.text,
    "calib": checks.text,
    "bucket": checks.text,
    "number": checks.integer(0, 1 << 40),
    "gen": checks.integer(0, MAX_GENERATION),
    "rows": checks.integer(1, 1 << 20),
    "first_row": checks.integer(0, 1 << 40),
    "lengths": checks.list_of(checks.integer(0, 1 << 20)),
    "documents": checks.list_of(checks.integer(0, 1 << 40)),
    "arrays": checks.mapping,
    "quantisation": checks.mapping,
    "bad": checks.list_of(checks.mapping),
    "software": checks.mapping,
    "device": checks.text,
}
OPTIONAL = ("quantisation",)  # of shards with storage int8
ARRAY_FIELDS: dict[str, checks.Check] = {
    "bytes": checks.integer(0, 1 << 50),
    "crc32c": checks.list_of(CRC),
    "block": checks.integer(1, 1 << 20),  # of shards that `dflash pack` wrote
}
SUMS: checks.Check = checks.list_of(lambda v: type(v) in (int, float) and 0 <= v < float("inf"))
QUANTISATION_FIELDS = {"squared_error": SUMS, "squares": SUMS}
MAX_CHUNKS = 1 << 24  # of an array in blocks: its footer is made in memory


def make_manifest(
    store: "Store",
    shard: Shard,
    lengths: np.ndarray,
    arrays: dict[str, Any],
    bad: list[dict[str, Any]],
    device: str,
    software: dict[str, str],
    quantisation: dict[str, list[float]] | None = None,
) -> dict[str, Any]:
    rows = store.bucket(shard[0]).rows_of(shard[1])
    documents = store.plan.rows[shard[0]].document[rows.start : rows.stop]
    manifest = {
        "format": FORMAT_VERSION,
        "store": store.fingerprint,
        "plan": store.meta.fingerprints["plan"],
        "calib": store.calib_fingerprint(),
        "bucket": shard[0],
        "number": shard[1],
        "gen": store.index.next_generation(shard),
        "rows": len(rows),
        "first_row": rows.start,
        "lengths": [int(n) for n in lengths],
        "documents": [int(n) for n in documents],
        "arrays": arrays,
        **({"quantisation": quantisation} if quantisation else {}),
        "bad": sorted(bad, key=lambda item: item["row"]),
        "software": software,
        "device": device,
    }
    for item in bad:
        checks.check_fields(item, BAD_FIELDS, f"bad documents of shard {shard_text(shard)}")
    return with_crc(manifest)


def entry_of(manifest: dict[str, Any], checksums: dict[str, int], folder: Path, worker: int) -> dict[str, Any]:
    """The index line of a shard."""
    same = ("bucket", "number", "gen", "rows", "lengths", "bad", "software", "device")
    entry = {name: manifest[name] for name in same}
    return {**entry, "bytes": allocated_bytes(folder), "checksums": checksums, "worker": worker}


def read_manifest(store: "Store", shard: Shard) -> tuple[dict[str, Any], bytes]:
    """The manifest of a shard on disk, checked against the store, and the bytes of the group's zarr.json."""
    where = f"Shard {shard_text(shard)} of store {store.root}: zarr.json"
    try:
        content = read_inside(store.root, (*shard_parts(shard), "zarr.json"), limit=1 << 28)
    except (FileNotFoundError, NotADirectoryError):
        raise DflashError(
            f"{where} is missing; `dflash verify --repair` retires the shard, `dflash extract` makes it again."
        ) from None
    except OSError as error:
        raise DflashError(
            f"{where} cannot be read ({os.strerror(error.errno or 0)}); `dflash verify --repair` retires the shard."
        ) from None
    group = parse_json(content, where)
    known = type(group) is dict and group.get("zarr_format") == 3 and group.get("node_type") == "group"
    if not known or group.keys() != {"zarr_format", "node_type", "attributes"}:
        raise DflashError(f"{where} is not the Zarr v3 group of a shard; `dflash verify --repair` retires the shard.")
    manifest = check_crc(group["attributes"], where)
    checks.check_fields(manifest, MANIFEST_FIELDS, where, optional=OPTIONAL)
    _check_belongs(store, shard, manifest, where)
    if content != group_document(group["attributes"]):
        raise DflashError(f"{where} is not spelled as dflash writes it; `dflash verify --repair` retires the shard.")
    return manifest, content


def _check_belongs(store: "Store", shard: Shard, manifest: dict[str, Any], where: str) -> None:
    """It is this shard of this store, and its lists have the lengths that store.json and the plan fix."""
    bucket = store.bucket(shard[0])
    rows, name = bucket.rows_of(shard[1]), shard_text(shard)
    plan = store.plan.rows[shard[0]]
    planned = plan.length[rows.start : rows.stop].tolist()
    if (manifest["bucket"], manifest["number"]) != shard:
        other = shard_text((manifest["bucket"][:20], manifest["number"]))
        raise DflashError(
            f"{where} says that it is {other}, not {name}; name the folders as they were, or `dflash verify --repair` "
            "retires the shard."
        )
    if manifest["store"] != store.fingerprint or manifest["plan"] != store.meta.fingerprints["plan"]:
        raise DflashError(
            f"{where} belongs to another store (other fingerprint); `dflash verify --repair` retires the shard."
        )
    lists_fit = manifest["rows"] == len(rows) == len(manifest["lengths"]) and manifest["first_row"] == rows.start
    if not lists_fit or manifest["documents"] != plan.document[rows.start : rows.stop].tolist():
        raise DflashError(
            f"{where}: rows or documents are not those of the plan; `dflash verify --repair` retires the shard."
        )
    if any(n not in (0, m) for n, m in zip(manifest["lengths"], planned, strict=True)):
        raise DflashError(
            f"{where}: the field 'lengths' has a row neither whole nor empty; `dflash verify --repair` "
            "retires the shard."
        )
    specs = store.meta.specs(bucket.ceiling)
    if manifest["arrays"].keys() != specs.keys():
        raise DflashError(
            f"{where}: the arrays are not exactly {', '.join(specs)}; `dflash verify --repair` retires the shard."
        )
    for array, spec in specs.items():
        about = checks.check_fields(manifest["arrays"][array], ARRAY_FIELDS, f"{where}: arrays.{array}", ("block",))
        if len(about["crc32c"]) != spec.checksums(len(rows)) or not _size_fits(spec, about, manifest["lengths"]):
            raise DflashError(
                f"{where}: arrays.{array} has a wrong size or number of checksums; `dflash verify --repair` "
                "retires the shard."
            )
    if "quantisation" in manifest:
        sums = checks.check_fields(manifest["quantisation"], QUANTISATION_FIELDS, f"{where}: quantisation")
        if any(len(each) != len(store.meta.taps) for each in sums.values()):
            raise DflashError(
                f"{where}: quantisation has not one sum per tap; `dflash verify --repair` retires the shard."
            )
    for item in manifest["bad"]:
        checks.check_fields(item, BAD_FIELDS, f"{where}: bad")


def _size_fits(spec: ArraySpec, about: dict[str, Any], lengths: list[int]) -> bool:
    """The size that the manifest gives for an array's file is the only possible one (of compressed rows: any)."""
    if "block" not in about:
        return spec.packed or about["bytes"] == spec.file_bytes(len(lengths))
    if not spec.sparse or spec.ceiling % about["block"]:
        return False
    spec = replace(spec, block=about["block"])
    data = int(spec.block_bytes(np.array(lengths)).sum())
    return spec.chunks(len(lengths)) <= MAX_CHUNKS and about["bytes"] == data + spec.footer_bytes(len(lengths))


def specs_of(store: "Store", shard: Shard, manifest: dict[str, Any]) -> dict[str, ArraySpec]:
    """The arrays of a shard as this one has them: in blocks where `dflash pack` wrote it."""
    specs, arrays = store.specs(store.bucket(shard[0]).ceiling), manifest["arrays"]
    return {name: replace(spec, block=arrays[name].get("block", 0)) for name, spec in specs.items()}
