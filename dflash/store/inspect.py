"""What is in a shard, or in a whole store: what people look at first when something is off.

Works without the target and without torch. A row that fails its checksum is named and left out of the figures; it
never stops the view. Values are looked at in slices, so memory stays small whatever the ceiling.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dflash.errors import DflashError
from dflash.files import allocated_bytes
from dflash.store import paths
from dflash.store.check_shard import Problem, check_shard, problem
from dflash.store.layout import Shard, parse_shard_folder, shard_text
from dflash.store.reader import OpenShard
from dflash.store.store import Store
from dflash.store.taps import TapFigures
from dflash.store.text import decode_row
from dflash.store.verify import verify as verify_store

BARS = 10


def inspect(path: str | Path, row: int | None = None, text: bool = False, verify: bool = False) -> dict[str, Any]:
    """A shard's view (design section 8), or a store's summary when `path` is a store."""
    path = Path(path)
    if (path / paths.STORE_JSON).exists():
        if row is not None or text:
            raise DflashError(
                f"{path} is a whole store; --row and --text need one of its shards, like"
                f" {path}/shards/{Store.open(path).buckets[0].name}/s000000.zarr."
            )
        return inspect_store(path, verify)
    root, shard = find_shard(path)
    return inspect_shard(Store.open(root), shard, row, text, verify)


def find_shard(path: Path) -> tuple[Path, Shard]:
    """The store and the shard that a folder `STORE/shards/b1216/s000007.zarr` is."""
    if not path.is_dir():
        raise DflashError(f"{path} is not a folder; give a store, or a shard like STORE/shards/b0770/s000000.zarr.")
    whole = path.resolve()
    number = parse_shard_folder(whole.name)
    root = whole.parent.parent.parent
    if number is None or whole.parent.parent.name != paths.SHARDS or not (root / paths.STORE_JSON).exists():
        raise DflashError(f"{path} is neither a store nor a shard inside one (STORE/shards/b0770/s000000.zarr).")
    return root, (whole.parent.name, number)


def inspect_shard(store: Store, shard: Shard, row: int | None, text: bool, verify: bool) -> dict[str, Any]:
    bucket, opened = store.bucket(shard[0]), OpenShard(store, shard)
    if row is not None and not 0 <= row < opened.rows:
        raise DflashError(f"Shard {shard_text(shard)} has {opened.rows} rows, so there is no row {row}.")
    rows = range(opened.rows) if row is None else [row]
    problems = check_shard(store, shard) if verify else []
    documents, taps = [], TapFigures(store)
    for i in rows:
        about = _document(opened, i)
        try:
            values = _read(opened, i)
            taps.add(values)
            about |= _supervision(values)
            if text:
                about["text"] = decode_row(store.target_folder, values["input_ids"], values["loss_mask"])
        except DflashError as error:
            if not verify:
                problems.append(problem(shard, None, i, str(error)))
        documents.append(about)
    valid = sum(opened.lengths[i] for i in rows)
    padded = len(rows) * bucket.ceiling
    return {
        "store": str(store.root),
        "shard": shard_text(shard),
        "bucket": bucket.name,
        "ceiling": bucket.ceiling,
        "held_out": bucket.held_out,
        "rows": opened.rows,
        "row": row,
        "generation": opened.manifest["gen"],
        "software": opened.manifest["software"],
        "device": opened.manifest["device"],
        "arrays": _arrays(opened),
        "documents": documents,
        "padding": {"tokens": valid, "padded_tokens": padded, "share": 1 - valid / padded},
        "taps": taps.result(),
        "labels": _labels(documents, store.meta.labels),
        "anchors": sum(about.get("anchors", 0) for about in documents),
        "bad": opened.manifest["bad"],
        "checksums": _checksums(opened, problems, verify),
    }


def _checksums(opened: OpenShard, problems: list[Problem], everything: bool) -> dict[str, Any]:
    return {
        "ok": not problems,
        "checked": "everything" if everything else "rows",
        "problems": problems,
        "manifest": opened.entry["checksums"]["zarr.json"],
        "rows": {name: about["crc32c"] for name, about in opened.manifest["arrays"].items()},
    }


def _read(opened: OpenShard, row: int) -> dict[str, np.ndarray]:
    n = opened.lengths[row]
    out = {name: np.empty((n, *s.token_shape), s.dtype) for name, s in opened.specs.items() if s.by_row}
    opened.read_into(row, out)
    return out


def _arrays(opened: OpenShard) -> dict[str, Any]:
    folder = paths.shard_path(opened.store.root, opened.shard)
    return {
        name: {
            "shape": list(spec.shape(opened.rows)),
            "dtype": spec.dtype.name,
            "view_dtype": spec.view_dtype or spec.dtype.name,
            "bytes": allocated_bytes(folder / name),
            "file_bytes": opened.manifest["arrays"][name]["bytes"],
        }
        for name, spec in opened.specs.items()
    }


def _document(opened: OpenShard, row: int) -> dict[str, Any]:
    plan, i = opened.store.plan, opened.manifest["first_row"] + row
    rows = plan.rows[opened.shard[0]]
    file, line = plan.files[int(rows.file[i])], int(rows.line[i])
    return {
        "row": row,
        "document": int(rows.document[i]),
        "conversation": int(rows.conversation[i]),
        "file": file,
        "line": line,
        "source": f"{file}:{line}",
        "length": opened.lengths[row],
        "planned_length": int(rows.length[i]),
    }


def _supervision(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Supervised tokens, anchors (p and p + 1 supervised) and how far the labels are the data's own tokens."""
    mask = values["loss_mask"].astype(bool)
    about: dict[str, Any] = {"supervised": int(mask.sum()), "anchors": int((mask[:-1] & mask[1:]).sum())}
    if "labels" in values:
        judged = mask & (values["labels"] >= 0)
        about["labelled"] = int(judged.sum())
        about["agree"] = int((values["labels"] == values["input_ids"])[judged].sum())
    return about


def _labels(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    labelled = sum(about.get("labelled", 0) for about in documents)
    agree = sum(about.get("agree", 0) for about in documents)
    return {"kind": kind, "labelled": labelled, "agreement": agree / labelled if labelled else None}


def inspect_store(root: Path, verify: bool = False) -> dict[str, Any]:
    """Counts, sizes and a histogram of lengths per bucket; reads no shard unless `verify`."""
    store = Store.open(root)
    meta, missing = store.meta, [shard_text(shard) for shard in store.missing()]
    result: dict[str, Any] = {
        "store": str(root),
        "target": meta.target["name"],
        "taps": list(meta.taps),
        "tap_convention": meta.tap_convention,
        "hidden_size": meta.hidden_size,
        "vocab_size": meta.vocab_size,
        "storage": meta.storage,
        "labels": meta.labels,
        "documents": len(store.documents),
        "rows": sum(bucket.rows for bucket in store.buckets),
        "tokens": sum(int(rows.length.sum(dtype=np.int64)) for rows in store.plan.rows.values()),
        "supervised_tokens": sum(int(rows.supervised.sum(dtype=np.int64)) for rows in store.plan.rows.values()),
        "shards": len(store.index.entries),
        "missing": missing,
        "bytes": allocated_bytes(root),
        "counts": meta.counts,
        "buckets": [_bucket(store, bucket.name) for bucket in store.buckets],
        "bad": [
            {"shard": shard_text(shard), **item}
            for shard, entry in sorted(store.index.entries.items())
            for item in entry["bad"]
        ],
    }
    if verify:
        result["checksums"] = verify_store(root)
    return result


def _bucket(store: Store, name: str) -> dict[str, Any]:
    bucket, rows = store.bucket(name), store.plan.rows[name]
    entries = [entry for shard, entry in store.index.entries.items() if shard[0] == name]
    edges = np.unique(np.linspace(0, bucket.ceiling, BARS + 1).astype(np.int64))
    counts, _ = np.histogram(rows.length, bins=edges + 0.5)
    tokens = int(rows.length.sum(dtype=np.int64))
    return {
        "name": name,
        "ceiling": bucket.ceiling,
        "held_out": bucket.held_out,
        "rows": bucket.rows,
        "shards": len(entries),
        "of_shards": bucket.num_shards,
        "tokens": tokens,
        "supervised_tokens": int(rows.supervised.sum(dtype=np.int64)),
        "padding": 1 - tokens / (bucket.rows * bucket.ceiling) if bucket.rows else 0.0,
        "bytes": sum(entry["bytes"] for entry in entries),
        "lengths": [
            {"from": int(a) + 1, "to": int(b), "rows": int(n)}
            for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
    }
