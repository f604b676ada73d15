"""What is in a shard, or in a whole store: what people look at first when something is off.

Works without the target and without torch. A row that fails its checksum is named and left out of the figures; it
never stops the view. Values are looked at in slices, so memory stays small whatever the ceiling. Of a whole store the
figures over states are those of some rows, spread evenly; all else is exact.
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
SAMPLE_ROWS = 64  # of a whole store, whose states are read
SAMPLE_BYTES = 256 << 20


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
        raise DflashError(
            f"{path} is neither a store nor a shard inside one; give one like STORE/shards/b0770/s000000.zarr."
        )
    return root, (whole.parent.name, number)


def inspect_shard(store: Store, shard: Shard, row: int | None, text: bool, verify: bool) -> dict[str, Any]:
    bucket, opened = store.bucket(shard[0]), OpenShard(store, shard)
    if row is not None and not 0 <= row < opened.rows:
        raise DflashError(
            f"Shard {shard_text(shard)} has {opened.rows} rows, so there is no row {row}; give a smaller one."
        )
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
        "taps": [tap | lost for tap, lost in zip(taps.result(), _int8_errors(store, [opened.manifest]), strict=True)],
        "labels": _labels(documents, store.meta.labels),
        "anchors": sum(about.get("anchors", 0) for about in documents),
        "bad": opened.manifest["bad"],
        "checksums": _checksums(opened, problems, verify),
    }


def _int8_errors(store: Store, manifests: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Per tap {int8_error}: the relative L2 error that storing in 8 bits made, as extraction measured it over all
    values of these shards; nothing for other storage."""
    sums = [each["quantisation"] for each in manifests if "quantisation" in each]
    if not sums:
        return [{} for _ in store.meta.taps]
    error, squares = (np.sum([each[name] for each in sums], axis=0) for name in ("squared_error", "squares"))
    return [{"int8_error": float(np.sqrt(e / s)) if s else 0.0} for e, s in zip(error, squares, strict=True)]


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
    """Counts, sizes, a histogram of lengths per bucket, and the figures of a shard over a sample of rows."""
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
        "sources": _sources(store),
        "rows": sum(bucket.rows for bucket in store.buckets),
        "tokens": sum(int(rows.length.sum(dtype=np.int64)) for rows in store.plan.rows.values()),
        "supervised_tokens": sum(int(rows.supervised.sum(dtype=np.int64)) for rows in store.plan.rows.values()),
        "anchors": _anchors(store),
        "sample": _sample(store),
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


def _sample(store: Store) -> dict[str, Any]:
    """What some rows of every bucket show: arrays, taps, labels, checksums; and how many rows of how many shards."""
    # the first of every bucket, then the second: a limit must not leave a bucket out
    turns = [(turn, bucket.name, row) for bucket in store.buckets for turn, row in _spread_rows(store, bucket.name)]
    taps, documents, problems, read = TapFigures(store), [], [], 0
    shards: dict[Shard, OpenShard] = {}
    for _, name, row in sorted(turns):
        number, inner = store.bucket(name).shard_of(row)
        shard = (name, number)
        try:
            if shard not in shards:
                shards[shard] = OpenShard(store, shard)
            values = _read(shards[shard], inner)
            taps.add(values)
            documents.append(_supervision(values))
            read += sum(array.nbytes for array in values.values())
        except DflashError as error:
            problems.append(problem(shard, None, None, str(error)))
        if read > SAMPLE_BYTES:
            break
    losses = _int8_errors(store, [opened.manifest for opened in shards.values()])
    specs = store.specs(store.buckets[0].ceiling).values()
    return {
        "arrays": {
            s.name: {"dtype": s.dtype.name, "view_dtype": s.view_dtype or s.dtype.name,
                     "shape": [None, *([None, *s.token_shape] if s.by_row else [])]}  # rows and ceiling vary
            for s in specs
        },
        "taps": [tap | lost for tap, lost in zip(taps.result(), losses, strict=True)] if documents else [],
        "labels": _labels(documents, store.meta.labels),
        "rows": len(documents), "shards": len(shards), "of_shards": len(store.index.entries),
        "checksums": {"ok": not problems, "checked": "sampled rows", "problems": problems},
    }  # fmt: skip


def _spread_rows(store: Store, name: str) -> list[tuple[int, int]]:
    """(turn, row) of some rows of a bucket, evenly spread, of shards that are there."""
    most = max(1, SAMPLE_ROWS // len(store.buckets))
    rows = store.bucket(name).rows
    wanted = np.unique(np.linspace(0, max(rows - 1, 0), min(most, rows)).astype(int)).tolist()
    return [(turn, row) for turn, row in enumerate(wanted) if store.length(name, row)]


def _sources(store: Store) -> list[dict[str, Any]]:
    """Per file of the data, how many rows come from it and the lines from which to which."""
    found = []
    files = np.concatenate([rows.file for rows in store.plan.rows.values()])
    lines = np.concatenate([rows.line for rows in store.plan.rows.values()])
    for number, name in enumerate(store.plan.files):
        own = lines[files == number]
        if len(own):
            found.append({"file": name, "rows": len(own), "first_line": int(own.min()), "last_line": int(own.max())})
    return found


def _anchors(store: Store) -> int:
    """Positions p with p and p + 1 supervised, of all documents."""
    mask, ends, count, step = store.documents.mask, store.documents.offsets[1:-1].astype(np.int64), 0, 1 << 24
    for start in range(0, max(len(mask) - 1, 0), step):
        part = mask[start : start + step + 1]
        count += int((part[:-1] & part[1:]).sum(dtype=np.int64))
    return count - int((mask[ends - 1] & mask[ends]).sum(dtype=np.int64))  # no pair across two documents


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
