"""The store: the contract between the stages. numpy, zarr's format and numcodecs; no torch.

docs/store-format.md is its specification. `create_store` makes one, `ShardWriter` fills it under `acquire_lock`,
`Store` reads it, `verify` and `inspect` look into it.
"""

from dflash.store.calib import read_calib, write_calib
from dflash.store.forecast import storage_bytes
from dflash.store.inspect import inspect
from dflash.store.layout import Bucket, array_specs, bucket_name, default_rows_per_shard, shard_text
from dflash.store.lock import acquire_lock
from dflash.store.meta import StoreMeta, check_same, differences
from dflash.store.pack import pack
from dflash.store.plan import Documents, DocumentsWriter, Plan, PlanRows, Prepared
from dflash.store.recover import recover
from dflash.store.shard import ShardWriter
from dflash.store.store import Store, create_store
from dflash.store.verify import verify

__all__ = [
    "Bucket",
    "Documents",
    "DocumentsWriter",
    "Plan",
    "PlanRows",
    "Prepared",
    "ShardWriter",
    "Store",
    "StoreMeta",
    "acquire_lock",
    "array_specs",
    "bucket_name",
    "check_same",
    "create_store",
    "default_rows_per_shard",
    "differences",
    "inspect",
    "pack",
    "read_calib",
    "recover",
    "shard_text",
    "storage_bytes",
    "verify",
    "write_calib",
]
