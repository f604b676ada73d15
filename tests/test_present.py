"""Screens for people: 80 columns, one screen, what was made and where, the next command; robust to missing keys."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash import present
from dflash.present.parts import size

CONFIG: Any = SimpleNamespace(
    store="/nvme/store", run="runs/r", target="T", out="o", drafter="d", shard="b0770/s000001", dry_run=False
)
DATA: Any = SimpleNamespace(data=("a.jsonl", "b.jsonl"))
SLOTS = [{"slot": slot, "acceptance": 0.9**slot, "conditional": 0.9} for slot in range(1, 16)]
LENGTH = {"pooled": 4.256, "macro": 4.1}
FULL: dict[str, tuple[dict[str, Any], tuple[Any, ...], list[str]]] = {
    "extract": (
        {
            "documents": 1234, "tokens": 100_000, "supervised_tokens": 40_000, "rows": 1234, "bytes": 2_500_000_000,
            "dropped": {"too short": 3, "duplicate": 0}, "shards": 17, "seconds": 200.4, "tokens_per_second": 1449.6,
            "limited_by": "gpu", "buckets": [{"ceiling": 770, "rows": 1200, "tokens": 90_000}],
        },
        (CONFIG, DATA),
        ["Store complete: /nvme/store", "1,234", "40.0% supervised", "2.5 GB", "too short 3", "3 min 20 s",
         "1,450 tokens/s", "the target's forward", "770", "dflash train --store /nvme/store"],
    ),
    "train": (
        {"steps": 400, "loss": 1.23456, "acceptance_length": LENGTH, "checkpoint": "runs/r/checkpoints/step-000400",
         "tokens_per_second": 5123.4, "data_wait": 0.0123, "skipped": 3, "ranks": 8},
        (CONFIG,),
        ["runs/r", "400, 3 updates skipped", "1.2346", "4.26 pooled", "5,123 tokens/s on each of 8 processes", "1.2%",
         "dflash export runs/r"],
    ),
    "export": (
        {"out": "runs/r/export", "step": 400, "why": "the newest", "layout": "z-lab", "dtype": "bfloat16",
         "parameters": 12_345_678, "checked_on": "b0770 row 0", "target": "T"},
        (CONFIG,),
        ["runs/r/export", "step 400 (the newest)", "12,345,678", "compared on b0770 row 0", "--drafter runs/r/export"],
    ),
    "eval": (
        {"acceptance_length": LENGTH, "per_slot": SLOTS, "identical": 7, "ties": 1, "wrong": 0, "lossless": True,
         "acceptance_length_ci": {"level": 0.95, "pooled": [4.1, 4.4], "macro": [3.9, 4.3]},
         "tokens_per_second": 61.25, "baseline_tokens_per_second": 24.3, "speedup": 2.52, "prompts": 8, "answers": 9,
         "tokens": 1234, "temperature": 0.0, "repeated_ngrams": {"n": 8, "share": 0.125, "looping_answers": 2},
         "histogram": [{"length": n, "cycles": 20 - n, "share": (20 - n) / 184} for n in range(1, 17)],
         "by_category": [{"category": name, "answers": 3, "cycles": 50, "pooled": 4.5, "macro": 4.0,
                          "pooled_ci": [4.0, 5.0]} for name in ("writing", "eval_humaneval_long_name")],
         "by_context": [{"from": 0, "to": 128, "cycles": 1234, "pooled": 4.4},
                        {"from": 128, "to": 256, "cycles": 66, "pooled": 3.9}],
         "compare": {"drafter": "other/drafter", "acceptance_length": {"pooled": 4.0, "macro": 3.9},
                     "tokens_per_second": 55.0, "difference": {
                         "pooled": 0.256, "pooled_ci": [0.1, 0.4], "macro": 0.2, "macro_ci": [-0.1, 0.5], "better": 5,
                         "equal": 1, "worse": 2}}},
        (CONFIG,),
        ["4.26 pooled (4.10 to 4.40), 4.10 macro (3.90 to 4.30)", "61.2 tokens/s", "2.52 times",
         "identical 7, ties 1, wrong 0: the target's own", "8, 9 answers, 1,234 new tokens, greedy",
         "12.5%, 2 answers loop", "writing", "maneval_long_name", "4.00 to 5.00", "0 to 128", "1,234", "█",
         "+0.26 (+0.10 to +0.40)", "other/drafter", "better on 5, equal on 1, worse on 2"],
    ),
    "regenerate": (
        {"prompts": 290, "responses": 300, "resumed": 20, "new_tokens": 30_000, "seconds": 90.0,
         "tokens_per_second": 333.3, "dropped": {"no_room_for_answer": 1}},
        (CONFIG,),
        ["Answers written: o", "300 (20 were there", "30,000", "no_room_for_answer 1", "333 tokens/s",
         "dflash extract --target T --data o"],
    ),
    "inspect_shard": (
        {"store": "/nvme/store", "shard": "b0770/s000001", "bucket": "b0770", "rows": 42,
         "padding": {"tokens": 24_255, "padded_tokens": 32_340, "share": 0.25},
         "arrays": {"hidden": {"shape": [42, 770, 2880], "dtype": "uint16", "bytes": 186_000_000}},
         "documents": [{"row": n, "length": 700, "supervised": 300, "source": f"chats.jsonl:{n}"} for n in range(42)],
         "taps": [{"layer": 1, "rms": 0.123456, "nonfinite": 0, "zero_rows": 0}],
         "labels": {"agreement": 0.984}, "bad": [], "checksums": {"ok": True, "checked": "rows", "problems": []}},
        (CONFIG,),
        ["Shard b0770/s000001 of /nvme/store", "24,255 tokens, 25.0% padding", "42x770x2880", "186.0 MB", "0.1235",
         "98.4%", "all right (rows read)", "chats.jsonl:11", "and 30 more"],
    ),
    "pack": (
        {"store": "/nvme/store", "out": "/nvme/packed", "shards": 17, "packed": 3, "missing": ["b0770/s000001"],
         "bytes": 2_000_000_000, "file_bytes": 2_000_000_000, "source_file_bytes": 2_700_000_000, "seconds": 12.0},
        (SimpleNamespace(out="/nvme/packed"),),
        ["Store packed: /nvme/packed", "/nvme/store", "17, 1 missing in the source", "2.0 GB", "2.7 GB", "12 s",
         "dflash verify /nvme/packed"],
    ),
    "verify": (
        {"ok": False, "shards": 17, "problems": [
            {"shard": f"b1216/s{n:06d}", "array": "hidden", "row": 0, "problem": "crc32c differs"} for n in range(20)
        ]},
        (CONFIG,),
        ["20 problems", "b1216/s000000", "and 8 more (--json", "--repair"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FULL))
def test_a_screen_shows_the_result_and_fits(name: str) -> None:
    result, configs, words = FULL[name]
    text = getattr(present, name)(result, *configs)
    for word in words:
        assert word in text
    lines = text.splitlines()
    assert len(lines) <= (40 if name != "eval" else 45)
    assert max(map(len, lines)) <= 80
    assert "None" not in text


@pytest.mark.parametrize("name", sorted(FULL))
def test_a_key_that_is_missing_leaves_its_line_out(name: str) -> None:
    result, configs, _ = FULL[name]
    for key in result:
        text = getattr(present, name)({k: v for k, v in result.items() if k != key}, *configs)
        assert "None" not in text
    assert getattr(present, name)({}, *configs)


def test_a_forecast_says_that_nothing_was_written_and_how_to_go_on() -> None:
    result, _, _ = FULL["extract"]
    text = present.extract(result, SimpleNamespace(**vars(CONFIG) | {"dry_run": True}), DATA)
    assert "nothing was written" in text
    assert "without --dry-run" in text


def test_output_that_is_not_the_targets_own_stands_out() -> None:
    result, configs, _ = FULL["eval"]
    text = present.eval({**result, "wrong": 2, "lossless": False}, *configs)
    assert "wrong 2" in text
    assert "NO" in text
    assert "Next" not in text


def test_a_sound_store_leads_to_training() -> None:
    text = present.verify({"ok": True, "shards": 3, "problems": []}, CONFIG)
    assert "sound" in text
    assert "dflash train --store /nvme/store" in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e12, "2.5 TB"), (7e15, "7,000.0 TB")]
)
def test_sizes_as_disks_are_sold(count: float, text: str) -> None:
    assert size(count) == text


def test_a_text_shows_its_supervised_part_and_cannot_steer_the_terminal() -> None:
    runs = [{"supervised": False, "text": "Hi\x1b[31m\n"}, {"supervised": True, "text": "Hello!"}]
    result = {"arrays": {}, "documents": [{"row": 3, "length": 5, "text": runs}]}
    text = present.inspect_shard(result, CONFIG)
    assert "Hi\N{REPLACEMENT CHARACTER}[31m\n\x1b[32m«Hello!»\x1b[0m" in text


def test_a_whole_store_is_summed_up_by_bucket() -> None:
    bucket = {"name": "v0770", "rows": 8, "shards": 1, "of_shards": 2, "tokens": 4000, "padding": 0.35, "bytes": 23e6}
    result = {"store": "/nvme/store", "shards": 1, "missing": ["v0770/s000001"], "buckets": [bucket], "taps": [1, 9]}
    text = present.inspect_shard(result, CONFIG)
    for word in ("Store /nvme/store", "1, 9", "1, 1 missing", "v0770", "1 of 2", "4,000", "35.0%", "23.0 MB"):
        assert word in text
    assert "Next" not in text
    assert "dflash train --store /nvme/store" in present.inspect_shard(result | {"missing": []}, CONFIG)


def test_a_store_whose_shards_are_missing_leads_to_extraction() -> None:
    text = present.verify({"ok": True, "shards": 1, "problems": [], "missing": ["b0770/s000001"]}, CONFIG)
    assert "missing" in text
    assert "dflash extract" in text
