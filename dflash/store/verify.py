"""Look at every byte of a store: checksums, padding, index against disk, plan against index, rows against documents.

`check_shard` finds what is wrong with one shard; `verify` does all and can repair: a damaged shard is retired (its
line first, durably), its folder moved away, and the next `dflash extract` makes it again.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash.errors import DflashError
from dflash.progress import progress
from dflash.store import paths
from dflash.store.check_shard import Problem, check_shard, problem
from dflash.store.index import append_line
from dflash.store.layout import Shard, parse_shard_folder, shard_text
from dflash.store.lock import acquire_lock
from dflash.store.meta import StoreMeta, read_meta
from dflash.store.plan import Documents, Plan
from dflash.store.recover import rebuild_index as make_index
from dflash.store.recover import shards_on_disk
from dflash.store.shard import move_away
from dflash.store.store import Store, check_file

THREADS = 4


def verify(root: str | Path, repair: bool = False, rebuild_index: bool = False) -> dict[str, Any]:
    """{ok, shards (looked at), problems [{shard, array, row, problem}], missing, redo, retired, rebuilt}.

    `ok` says that no problem was found; shards that were never made are `missing`, which is no damage. `redo` is what
    the next `dflash extract` will make: all of `missing`, and the damaged shards once they are retired.
    """
    root = Path(root)
    store, problems = _open(root)
    if store is None:
        return {
            "ok": False, "shards": 0, "problems": problems, "missing": [], "redo": [], "retired": [], "rebuilt": []
        }  # fmt: skip
    rebuilt: list[str] = []
    if rebuild_index:
        with acquire_lock(root, 0, 1):
            rebuilt = make_index(store)
    problems += _check_index(store)
    found: dict[Shard, list[Problem]] = {}
    entries = sorted(store.index.entries)
    with progress("verify", len(entries), "shards") as advance, ThreadPoolExecutor(THREADS) as pool:
        for shard, each in zip(entries, pool.map(lambda s: check_shard(store, s), entries), strict=True):
            found[shard] = each
            advance(1)
    problems += _blame_calib(store, found, repair)
    problems += [item for each in found.values() for item in each]
    damaged = {shard for shard, each in found.items() if each}
    retired = retire(store, sorted(damaged | set(store.index.conflicts))) if repair else []
    missing = [shard_text(shard) for shard in store.missing()]
    redo = sorted({*missing, *(shard_text(shard) for shard in damaged)})
    return {
        "ok": not problems, "shards": len(entries), "problems": problems, "missing": missing, "redo": redo,
        "retired": retired, "rebuilt": rebuilt,
    }  # fmt: skip


def _blame_calib(store: Store, found: dict[Shard, list[Problem]], repair: bool) -> list[Problem]:
    """Where not one shard was made with calib.safetensors, that file is at fault and not the shards. To repair is to
    remove it: the next `dflash extract` measures it again."""
    at_fault = [shard for shard, each in found.items() if any(item["array"] == paths.CALIB for item in each)]
    if not at_fault or len(at_fault) < len(found):
        return []
    for shard in at_fault:
        found[shard] = [item for item in found[shard] if item["array"] != paths.CALIB]
    if repair:
        (store.root / paths.CALIB).unlink(missing_ok=True)
    text = "is missing or not the one that the shards were made with; `dflash extract` measures a missing one again"
    return [problem(None, paths.CALIB, None, text)]


def retire(store: Store, shards: list[Shard]) -> list[str]:
    """Take shards out: first the index line, durable, then the folder. A crash between leaves a folder whose
    generation is retired, which nobody adopts."""
    if not shards:
        return []
    with acquire_lock(store.root, 0, 1):
        (store.root / paths.TMP).mkdir(exist_ok=True)
        for shard in shards:
            entry = store.index.entries.get(shard)
            if entry is None:
                continue
            append_line(store.root, 0, {"retire": list(shard), "gen": entry["gen"]})
            store.index.retire(shard, entry["gen"])
            folder = paths.shard_path(store.root, shard)
            if folder.is_symlink() or folder.exists():
                move_away(store.root, shard)
    return [shard_text(shard) for shard in shards]


def _open(root: Path) -> tuple[Store | None, list[Problem]]:
    """The store as far as its shards can be checked (a damaged target/ does not matter for that), and what is wrong
    with the files beside the shards."""
    if not (root / paths.STORE_JSON).exists():
        raise DflashError(f"{root} has no {paths.STORE_JSON}, so it is no store; give one that `dflash extract` made.")
    try:
        meta = read_meta(root)
    except DflashError as error:
        return None, [problem(None, paths.STORE_JSON, None, str(error))]
    try:
        paths.check_layout(root, (bucket.name for bucket in meta.buckets))
    except DflashError as error:
        return None, [problem(None, str(error).partition(" ")[0], None, str(error))]
    problems = _check_files(root, meta)
    known = {item["array"].partition("/")[0] for item in problems}
    documents = plan = None
    try:
        documents = Documents.open(root / paths.DOCS)
    except DflashError as error:
        if paths.DOCS not in known:
            problems.append(problem(None, paths.DOCS, None, str(error)))
    try:
        plan = Plan.load(root / paths.PLAN)
        if documents is not None:
            plan.check(meta.buckets, documents)
        if plan.fingerprint() != meta.fingerprints["plan"]:
            raise DflashError(f"{paths.PLAN} is not the one of store.json (other fingerprint); restore both.")
    except DflashError as error:
        plan = None
        if paths.PLAN not in known:
            problems.append(problem(None, paths.PLAN, None, str(error)))
    if documents is None or plan is None:
        return None, problems
    try:
        store = Store(root, meta, plan, documents)
    except DflashError as error:  # the index cannot be read at all
        return None, [*problems, problem(None, paths.INDEX, None, str(error))]
    store.documents_sound = paths.DOCS not in known
    return store, problems


def _check_files(root: Path, meta: StoreMeta) -> list[Problem]:
    """docs/, target/ and plan.npz by their sha256; nothing lies beside them."""
    problems = []
    for parts, about in meta.known_files():
        try:
            check_file(root, parts, about, whole=True)
        except DflashError as error:
            problems.append(problem(None, "/".join(parts), None, str(error)))
    for top in (paths.DOCS, paths.TARGET):
        for path in sorted((root / top).rglob("*")):
            name = path.relative_to(root / top).as_posix()
            if name not in meta.fingerprints[top] and not (path.is_dir() and not path.is_symlink()):
                problems.append(problem(None, f"{top}/{name}", None, "a file that store.json does not know"))
    return problems


def _check_index(store: Store) -> list[Problem]:
    """Every line is whole and fits store.json; every folder of shards/ has its line."""
    index = store.index
    problems = [
        problem(None, f"{paths.INDEX}/{name}", None, f"line {line} is torn or damaged; --rebuild-index makes it again")
        for name, line in index.damaged
    ]
    problems += [problem(None, paths.INDEX, None, text) for text in index.strange]
    problems += [problem(shard, None, None, "two index lines of one generation differ") for shard in index.conflicts]
    for shard in shards_on_disk(store):
        if shard not in index.entries:
            text = "on disk but not in the index; `dflash extract` or --rebuild-index adopts it if it is whole"
            problems.append(problem(shard, None, None, text))
    known = {bucket.name: bucket for bucket in store.buckets}
    for name in sorted(os.listdir(store.root / paths.SHARDS)) if (store.root / paths.SHARDS).is_dir() else []:
        folder = store.root / paths.SHARDS / name
        if name not in known or folder.is_symlink() or not folder.is_dir():
            problems.append(problem(None, f"{paths.SHARDS}/{name}", None, "no bucket of this store"))
            continue
        for inner in sorted(os.listdir(folder)):
            number = parse_shard_folder(inner)
            if number is None or number >= known[name].num_shards:
                problems.append(problem(None, f"{paths.SHARDS}/{name}/{inner}", None, "no shard of this store's plan"))
    return problems
