"""Extraction: states and labels are the target's own, whatever kills, divides, fills or poisons the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny import FAMILIES, make_gguf, make_model, make_tiny
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.data.config import DataConfig
from dflash.data.prepare import prepare
from dflash.data.sources import data_fingerprint
from dflash.errors import DflashError, DiskFullError, Interrupted
from dflash.extract import pending, pipeline, states
from dflash.extract.config import ExtractConfig, parse_share, parse_size, parse_worker
from dflash.extract.run import extract
from dflash.store import Store
from dflash.store.verify import verify
from dflash.target import decoder_layers, load_target, text_model

BUCKETS = (24, 48)


def write_tokens(path: Path, lengths: list[int], seed: int = 0, vocabulary: int = 320) -> str:
    """Lines of random token ids; every document starts with the same five, as chats do."""
    draw = np.random.default_rng(seed)
    with path.open("w") as file:
        for length in lengths:
            ids = [7, 8, 9, 10, 11, *draw.integers(12, vocabulary, length).tolist()][:length]
            mask = [0, 0, *([1] * (length - 2))]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "data.jsonl", [5, 24, 9, 13, 48, 30, 25, 47, 6, 20, 21, 40])


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows a shard, so that twelve documents make several."""
    monkeypatch.setattr("dflash.extract.forecast.default_rows_per_shard", lambda ceiling: 3)


def run(target: Path, data: str, store: Path, **settings: Any) -> dict[str, Any]:
    data_settings = {
        k: settings.pop(k) for k in ("buckets", "holdout", "seed", "turns", "template_args") if k in settings
    }
    config = ExtractConfig(
        target=str(target),
        store=str(store),
        **{"num_taps": 3, "threads": 1, "device": "cpu", "forward_tokens": 96, **settings},
    )
    data_config = DataConfig(data=(data,), **{"buckets": BUCKETS, "holdout": 0.0, **data_settings})
    return extract(config, data_config, prepare, data_fingerprint)


def rows_of(store: Store) -> dict[int, dict[str, np.ndarray]]:
    """Document number -> its row's arrays."""
    found = {}
    for bucket in store.buckets:
        for row in range(bucket.rows):
            found[int(store.plan.rows[bucket.name].document[row])] = store.read_row(bucket.name, row)
    return found


def content_of(store: Path, below: str = "shards") -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in sorted((store / below).rglob("*")) if p.is_file()}


def own_forward(model: torch.nn.Module, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Every decoder layer's output, the normed last state and the logits, from the target's public interface."""
    caught: list[torch.Tensor] = []
    last_layer = decoder_layers(model)[-1]
    handle = last_layer.register_forward_hook(
        lambda m, a, out: caught.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    handle.remove()
    return [*output.hidden_states[1:-1], caught[0]], output.hidden_states[-1], output.logits


def bfloat16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def padded_batches(store: Store) -> list[tuple[list[int], torch.Tensor]]:
    """The batches as the contract fixes them, built apart from the code under test."""
    batches = []
    for bucket in store.buckets:
        documents = store.plan.rows[bucket.name].document
        for number in range(bucket.num_shards):
            rows = list(bucket.rows_of(number))
            for start in range(0, len(rows), bucket.rows_per_forward):
                chosen = [int(documents[row]) for row in rows[start : start + bucket.rows_per_forward]]
                ids = torch.zeros(len(chosen), bucket.ceiling, dtype=torch.int64)
                for i, document in enumerate(chosen):
                    tokens = torch.from_numpy(np.array(store.documents[document][0], dtype=np.int64))
                    ids[i, : len(tokens)] = tokens
                batches.append((chosen, ids))
    return batches


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_labels_are_the_targets_own(family: str, data: str, tmp_path: Path) -> None:
    """Bit for bit on the same padded batch: first, middle and last layer, normed last state, argmax."""
    target = make_tiny(tmp_path / "target", family)
    result = run(target, data, tmp_path / "store", layers=(0, 2, 5), labels="last-hidden")
    store, model = Store.open(tmp_path / "store"), load_target(target)
    rows, checked = rows_of(store), 0
    for documents, ids in padded_batches(store):
        layers, last, logits = own_forward(model, ids)
        for i, document in enumerate(documents):
            row, n = rows[document], len(store.documents[document][0])
            expected = torch.cat([layers[tap][i, :n].bfloat16() for tap in (0, 2, 5)], dim=-1)
            assert torch.equal(bfloat16(row["hidden"]), expected)
            assert torch.equal(bfloat16(row["last"]), last[i, :n].bfloat16())
            assert row["labels"][0] == -1
            top = logits[i, : n - 1].topk(2).values
            clear = top[:, 0] - top[:, 1] > 1e-5 * top[:, 0].abs()
            assert clear.any()
            assert torch.equal(torch.from_numpy(row["labels"][1:])[clear].long(), logits[i, : n - 1].argmax(-1)[clear])
            assert np.array_equal(row["input_ids"], store.documents[document][0])
            checked += n
    assert checked == result["tokens"] == sum([5, 24, 9, 13, 48, 30, 25, 47, 6, 20, 21, 40])
    assert verify(tmp_path / "store")["ok"]
    assert result["shards"] == len(store.shards()) == 5
    assert result["documents"] == result["rows"] == 12


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_equals_alone(family: str, side: str, tmp_path: Path) -> None:
    """Eight documents with a shared prefix, from five tokens to the ceiling: rows do not mix, padding reaches nothing,
    wherever the tokenizer would put it. Within rounding of each document run by itself; top-k and labels as well."""
    target = make_tiny(tmp_path / "target", family)
    tokenizer = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"padding_side": side}))
    draw = np.random.default_rng(3)
    texts = ["".join(["same ", *map(chr, draw.integers(97, 123, n - 5))]) for n in (5, 24, 9, 13, 48, 30, 25, 47)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(target, str(tmp_path / "data.jsonl"), tmp_path / "store", layers=(1, 5), labels="topk:4")
    store, model = Store.open(tmp_path / "store"), load_target(target)
    assert sorted(store.documents.lengths()) == sorted(map(len, texts))
    for document, row in rows_of(store).items():
        ids = torch.from_numpy(np.array(store.documents[document][0], dtype=np.int64))[None]
        layers, _, logits = own_forward(model, ids)
        for i, tap in enumerate((1, 5)):
            ours, alone = bfloat16(row["hidden"])[:, 64 * i : 64 * (i + 1)].float(), layers[tap][0].bfloat16().float()
            assert (ours - alone).norm() <= 1e-3 * alone.norm()
        top = logits[0, :-1].topk(5).values
        clear = (top[:, :-1] - top[:, 1:]).min(-1).values > 1e-4
        assert clear.any()
        assert np.array_equal(row["labels"][1:][clear], logits[0, :-1].argmax(-1)[clear])
        values, best = logits[0, :-1].log_softmax(-1).topk(4)
        assert np.array_equal(row["topk_ids"][1:][clear], best[clear])
        assert np.allclose(row["topk_logp"][1:], values, rtol=2e-3, atol=2e-3)


def test_a_gguf_file_is_a_target(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States, labels and top-k are those of the model that transformers itself loads from the quantised file."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    make_gguf(tmp_path / "tiny.gguf")
    for labels in ("last-hidden", "topk:4"):
        run(tmp_path / "tiny.gguf", data, tmp_path / labels, layers=(0, 5), labels=labels)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).eval()
    store = Store.open(tmp_path / "last-hidden")
    rows, tops = rows_of(store), rows_of(Store.open(tmp_path / "topk:4"))
    for documents, ids in padded_batches(store):
        layers, last, logits = own_forward(model, ids)
        for i, document in enumerate(documents):
            row, n = rows[document], len(store.documents[document][0])
            assert torch.equal(bfloat16(row["hidden"]), torch.cat([layers[t][i, :n].bfloat16() for t in (0, 5)], -1))
            assert torch.equal(bfloat16(row["last"]), last[i, :n].bfloat16())
            assert np.array_equal(row["labels"][1:], logits[i, : n - 1].argmax(-1))
            assert np.array_equal(tops[document]["topk_ids"][1:], logits[i, : n - 1].topk(4).indices)


def test_stale_and_nan_buffers_never_reach_the_store(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"labels": "topk:4"}
    run(tiny_target, data, tmp_path / "clean", **settings)
    made = states.Stage.__init__

    def poisoned(self: states.Stage, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for tensor in (*self.flat.values(), self.flat_ids, self.flat_index, self.flat_finite):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    monkeypatch.setattr(states.Stage, "__init__", poisoned)
    run(tiny_target, data, tmp_path / "poisoned", **settings)
    assert content_of(tmp_path / "clean") == content_of(tmp_path / "poisoned")
    assert verify(tmp_path / "poisoned")["ok"], "padding reads as it should"


def test_ties_take_the_smallest_id(tmp_path: Path, data: str) -> None:
    """Every head row twice: each argmax is a tie between id and id + 160."""
    target = make_tiny(tmp_path / "target", "llama")
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"][160:] = weights["lm_head.weight"][:160]
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    run(target, data, tmp_path / "store", labels="topk:4")
    for row in rows_of(Store.open(tmp_path / "store")).values():
        assert (row["labels"][1:] < 160).all()
        assert np.array_equal(row["topk_ids"][1:, 0], row["labels"][1:])
        assert np.array_equal(row["topk_ids"][1:, 1], row["labels"][1:] + 160)


def test_top_k_is_the_targets_distribution(tiny_target: Path, data: str, tmp_path: Path) -> None:
    run(tiny_target, data, tmp_path / "store", labels="topk:5")
    store, model = Store.open(tmp_path / "store"), load_target(tiny_target)
    rows = rows_of(store)
    for documents, ids in padded_batches(store):
        logp = own_forward(model, ids)[2].float().log_softmax(-1)
        for i, document in enumerate(documents):
            row = rows[document]
            n = len(row["labels"])
            values, best = logp[i, : n - 1].topk(5)
            assert torch.equal(torch.from_numpy(row["topk_ids"][1:]).long(), best)
            assert np.allclose(row["topk_logp"][1:].astype(np.float32), values.numpy(), rtol=1e-3, atol=1e-3)
            assert np.array_equal(row["topk_ids"][:, 0][1:], row["labels"][1:])
            assert not row["topk_ids"][0].any()
            assert not row["topk_logp"][0].any()


def test_tokens_alone_store_no_labels_and_lz4_loses_nothing(tiny_target: Path, data: str, tmp_path: Path) -> None:
    result = run(tiny_target, data, tmp_path / "plain", labels="tokens")
    run(tiny_target, data, tmp_path / "packed", labels="tokens", storage="lz4")
    assert result["label_agreement"] is None
    plain, packed = rows_of(Store.open(tmp_path / "plain")), rows_of(Store.open(tmp_path / "packed"))
    for document, row in plain.items():
        assert row.keys() == {"hidden", "input_ids", "loss_mask"}
        assert np.array_equal(row["hidden"], packed[document]["hidden"])


def test_int8_is_close_and_its_scales_fit(tiny_target: Path, data: str, tmp_path: Path) -> None:
    run(tiny_target, data, tmp_path / "plain")
    run(tiny_target, data, tmp_path / "small", storage="int8")
    rms = load_file(tmp_path / "small" / "calib.safetensors")["channel_rms"].numpy()
    plain, small = rows_of(Store.open(tmp_path / "plain")), rows_of(Store.open(tmp_path / "small"))
    everything = np.concatenate([bfloat16(row["hidden"]).float().numpy() for row in plain.values()])
    assert np.allclose(rms, np.sqrt((everything**2).mean(0)), rtol=1e-2)
    for document, row in small.items():
        true = bfloat16(plain[document]["hidden"]).float().numpy()
        scaled = row["hidden"].reshape(len(true), 3, 64) * row["scale"][:, :, None]
        assert (np.abs(row["hidden"].reshape(len(true), 3, 64)).max(-1) == 127).all(), "a scale uses the whole range"
        error = scaled.reshape(true.shape) * rms - true
        assert np.linalg.norm(error) < 0.02 * np.linalg.norm(true)


@pytest.mark.parametrize("settings", [{}, {"storage": "int8", "labels": "topk:3"}])
def test_a_document_that_is_not_finite_is_left_out_and_named(
    settings: dict[str, Any], tiny_target: Path, tmp_path: Path
) -> None:
    data = write_tokens(tmp_path / "data.jsonl", [20, 21, 22, 23, 40, 41])
    lines = Path(data).read_text().splitlines()
    bad = json.loads(lines[3])
    bad["input_ids"][10] = 319
    lines = [line.replace("319", "100") for line in lines]
    lines[3] = json.dumps(bad)
    Path(data).write_text("\n".join(lines) + "\n")
    target = shutil.copytree(tiny_target, tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][319] = torch.nan
    # the head is tied, so it gets one of its own without the NaN
    save_file(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].nan_to_num()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    result = run(target, data, tmp_path / "store", **settings)
    assert result["dropped"]["nonfinite"] == 1
    assert (result["documents"], result["rows"], result["tokens"]) == (5, 6, 20 + 21 + 22 + 40 + 41)
    assert result["supervised_tokens"] == result["tokens"] - 2 * 5
    [named] = result["nonfinite"]
    assert named["source"] == f"{data}:4"
    assert named["tap"] == 1
    store = Store.open(tmp_path / "store")
    for document, row in rows_of(store).items():
        assert len(row["labels"]) == (0 if document == 3 else len(store.documents[document][0]))
    assert verify(tmp_path / "store")["ok"]
    again = run(target, data, tmp_path / "store", **settings)
    assert again["documents"] == 5, "a complete store still counts it"


def test_too_many_bad_documents_stop_the_run(tiny_target: Path, data: str, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(DflashError, match=r"--max-bad .*data\.jsonl:\d+, tap 2"):
        run(target, data, tmp_path / "store")


def test_forecast_is_right_and_writes_nothing(tiny_target: Path, data: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    forecast = run(tiny_target, data, tmp_path / "deep" / "store", dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    real = run(tiny_target, data, tmp_path / "deep" / "store")
    for key in ("documents", "tokens", "supervised_tokens", "rows", "dropped"):
        assert forecast[key] == real[key]
    assert forecast["tokens"] == 288
    for found in (forecast, real):
        buckets = [(each["ceiling"], each["rows"], each["tokens"]) for each in found["buckets"]]
        assert buckets == [(24, 7, 98), (48, 5, 190)]
    assert abs(forecast["bytes"] - real["bytes"]) <= 0.02 * real["bytes"]
    assert real["limited_by"] in ("gpu", "disk", "data")
    assert real["tokens_per_second"] > 0


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("dflash.extract.run.load_target", load)
    with pytest.raises(DflashError, match="more than --budget 100KB"):
        run(tiny_target, data, tmp_path / "store", budget="100KB")
    monkeypatch.setattr("dflash.store.disk.free_bytes", lambda path: 1000)
    with pytest.raises(DflashError, match=r"1\.0 KB are free"):
        run(tiny_target, data, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_complete_store_is_left_alone(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tiny_target, data, tmp_path / "store")
    before = content_of(tmp_path, "store")

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tokenised or loaded again")

    monkeypatch.setattr("dflash.extract.run.load_target", never)
    monkeypatch.setattr("dflash.extract.run.prepare_documents", never)
    again = run(tiny_target, data, tmp_path / "store")
    assert "is complete" in capsys.readouterr().err
    assert content_of(tmp_path, "store") == before
    assert again["tokens"] == first["tokens"]
    assert again["made"] == 0


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"layers": (1, 2, 4)}, r"taps: it has \[1,2,3\], this command has \[1,2,4\]"),
        ({"labels": "tokens"}, 'labels: it has "argmax", this command has "tokens"'),
        ({"storage": "int8"}, "storage"),
        ({"dtype": "bfloat16"}, r'target\.dtype: it has "float32", this command has "bfloat16"'),
        ({"seed": 7}, "seed: it has 0, this command has 7"),
        ({"holdout": 0.1}, r"holdout: it has 0\.0, this command has 0\.1"),
        ({"turns": "last"}, "turns"),
        ({"buckets": (24, 48, 96)}, r"buckets: it has \[24,48\], this command has \[24,48,96\]"),
        ({"template_args": {"enable_thinking": False}}, "template_args"),
        ({"forward_tokens": 24}, "--forward-tokens"),
    ],
)
def test_another_setting_is_refused_with_both_values(
    change: dict[str, Any], names: str, tiny_target: Path, data: str, tmp_path: Path
) -> None:
    run(tiny_target, data, tmp_path / "store")
    with pytest.raises(DflashError, match=names):
        run(tiny_target, data, tmp_path / "store", **change)


def test_changed_content_is_refused_and_another_path_is_not(tiny_target: Path, data: str, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    run(target, data, tmp_path / "store")
    moved = shutil.copy(data, tmp_path / "renamed.jsonl")
    os.rename(target, tmp_path / "moved")
    os.rename(tmp_path / "store", tmp_path / "moved-store")
    target, store = tmp_path / "moved", tmp_path / "moved-store"
    run(target, str(moved), store)

    write_tokens(Path(moved), [5, 24, 9, 13, 48, 30, 25, 47, 6, 20, 21, 41])
    with pytest.raises(DflashError, match="another data"):
        run(target, str(moved), store)
    shutil.copy(data, moved)
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(template + " ")
    with pytest.raises(DflashError, match="another template"):
        run(target, str(moved), store)
    (target / "chat_template.jinja").write_text(template)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(DflashError, match=r"another target\.weights"):
        run(target, str(moved), store)


def test_any_number_of_workers_makes_the_same_store(tiny_target: Path, data: str, tmp_path: Path) -> None:
    run(tiny_target, data, tmp_path / "one")
    first = run(tiny_target, data, tmp_path / "many", worker="0/3")
    assert (first["made"], first["missing"]) == (2, 3)
    assert run(tiny_target, data, tmp_path / "many", worker="2/3")["made"] == 1
    assert run(tiny_target, data, tmp_path / "many")["made"] == 2, "worker 1 never came; one worker completes"
    assert content_of(tmp_path / "one") == content_of(tmp_path / "many")
    assert verify(tmp_path / "many")["ok"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import dflash.extract.forecast
dflash.extract.forecast.default_rows_per_shard = lambda ceiling: 3
from dflash.store import ShardWriter
{patch}
from pathlib import Path
from test_extract import run
run(Path({target!r}), {data!r}, Path({store!r}))
"""

KILL_IN_WRITE = """
count, write = 0, ShardWriter.write
def killing(self, *args):
    global count
    count += 1
    write(self, *args)
    if count == 7:
        os.kill(os.getpid(), signal.SIGKILL)
ShardWriter.write = killing
"""
KILL_BEFORE_LINE = """
import dflash.store.shard as shard
append, count = shard.append_line, 0
def killing(*args):
    global count
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    append(*args)
shard.append_line = killing
"""


@pytest.mark.parametrize("patch", [KILL_IN_WRITE, KILL_BEFORE_LINE])
def test_killed_and_resumed_is_byte_identical(patch: str, tiny_target: Path, data: str, tmp_path: Path) -> None:
    script = textwrap.dedent(KILLED).format(
        tests=str(Path(__file__).parent),
        patch=patch,
        target=str(tiny_target),
        data=data,
        store=str(tmp_path / "killed"),
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    there = len(Store.open(tmp_path / "killed").index.entries)
    assert there < 5
    result = run(tiny_target, data, tmp_path / "killed")
    run(tiny_target, data, tmp_path / "unbroken")
    assert 0 < result["made"] < 5
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "unbroken")
    assert content_of(tmp_path / "killed", "docs") == content_of(tmp_path / "unbroken", "docs")
    assert verify(tmp_path / "killed")["ok"]
    assert not list((tmp_path / "killed" / "tmp").iterdir())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_keeps_what_is_complete(
    signum: int, code: int, tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = states.Extractor.run, 0

    def stopping(self: states.Extractor, stage: states.Stage) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # the first of two batches of the second shard
            signal.raise_signal(signum)
        forward(self, stage)

    monkeypatch.setattr(states.Extractor, "run", stopping)
    with pytest.raises(Interrupted, match=r"1 of 5 shards are in .*same command") as stopped:
        run(tiny_target, data, tmp_path / "store", forward_tokens=48)
    assert stopped.value.exit_code == code
    assert not list((tmp_path / "store" / "tmp").iterdir())
    monkeypatch.setattr(states.Extractor, "run", forward)
    run(tiny_target, data, tmp_path / "store", forward_tokens=48)
    run(tiny_target, data, tmp_path / "unbroken", forward_tokens=48)
    assert content_of(tmp_path / "store") == content_of(tmp_path / "unbroken")


def test_a_signal_while_tokenising_leaves_nothing(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("went on")

    monkeypatch.setattr(sys.modules[__name__], "prepare", stopping)
    with pytest.raises(Interrupted, match="nothing is kept") as stopped:
        run(tiny_target, data, tmp_path / "store")
    assert stopped.value.exit_code == 143
    assert not (tmp_path / "store").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_places_that_cannot_be_written_are_named(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "docs"))

    monkeypatch.setattr(sys.modules[__name__], "prepare", full)
    with pytest.raises(DiskFullError, match="docs"):
        run(tiny_target, data, tmp_path / "store")
    (tmp_path / "file").write_text("")
    with pytest.raises(DflashError, match="file"):
        run(tiny_target, data, tmp_path / "file" / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    monkeypatch.undo()
    with pytest.raises(DflashError, match=r"thesis\.tex"):
        run(tiny_target, data, tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_a_full_disk_is_named_and_loses_nothing(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.pwrite, 0

    def full(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 15:
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError) as error:
        run(tiny_target, data, tmp_path / "store")
    assert error.value.exit_code == 28
    assert not list((tmp_path / "store" / "tmp").iterdir())
    monkeypatch.setattr(os, "pwrite", write)
    run(tiny_target, data, tmp_path / "store")
    assert verify(tmp_path / "store")["ok"]
    assert not Store.open(tmp_path / "store").missing()


def test_waiting_for_the_disk_is_reported(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    write = pending.ShardWriter.write

    def slow(self: pending.ShardWriter, *args: Any) -> None:
        time.sleep(0.4)
        write(self, *args)

    monkeypatch.setattr(pending.ShardWriter, "write", slow)
    result = run(tiny_target, data, tmp_path / "store", forward_tokens=24)
    assert result["limited_by"] == "disk"
    assert result["gpu_wait"] > 0.2


def test_an_error_in_a_writer_reaches_the_user(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: pending.ShardWriter, *args: Any) -> None:
        raise DflashError("the writer's own reason")

    monkeypatch.setattr(pending.ShardWriter, "write", failing)
    with pytest.raises(DflashError, match="the writer's own reason"):
        run(tiny_target, data, tmp_path / "store", forward_tokens=24)


def test_label_agreement_counts_supervised_tokens(tiny_target: Path, tmp_path: Path) -> None:
    """Greedy answers agree everywhere; one changed token does not."""
    model = load_target(tiny_target)
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.inference_mode():
        for _ in range(16):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    greedy = ids[0].tolist()
    mask = [0] * 4 + [1] * 16
    changed = [*greedy[:-1], (greedy[-1] + 1) % 320]

    def extract_one(name: str, tokens: list[int]) -> dict[str, Any]:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"input_ids": tokens, "loss_mask": mask}) + "\n")
        return run(tiny_target, str(tmp_path / f"{name}.jsonl"), tmp_path / name)

    assert extract_one("greedy", greedy)["label_agreement"] == 1.0
    assert extract_one("changed", changed)["label_agreement"] == 15 / 16


def test_logits_exist_for_a_chunk_of_positions_only(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(states.CHUNK, "cpu", 7)
    seen: list[int] = []
    real = states.head_logits

    def watched(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(len(hidden))
        return real(hidden, *args, **kwargs)

    monkeypatch.setattr(states, "head_logits", watched)
    run(tiny_target, data, tmp_path / "chunked")
    assert max(seen) == 7
    assert sum(seen) == 288 - 12, "positions that predict a token of their document, and no padding"
    monkeypatch.setitem(states.CHUNK, "cpu", 512)
    run(tiny_target, data, tmp_path / "whole")
    assert {k: v for k, v in content_of(tmp_path / "chunked").items() if "labels" in k} == {
        k: v for k, v in content_of(tmp_path / "whole").items() if "labels" in k
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("by_flag", [True, False])
def test_targets_in_half_precision(dtype: str, by_flag: bool, data: str, tmp_path: Path) -> None:
    """As the checkpoint is, in several files, or by --dtype from fp32: the forward runs in that type."""
    made = torch.float32 if by_flag else getattr(torch, dtype)
    make_model("qwen3-untied").to(made).save_pretrained(tmp_path / "target", max_shard_size="100KB")
    assert (tmp_path / "target" / "model.safetensors.index.json").exists()
    run(tmp_path / "target", data, tmp_path / "store", dtype=dtype if by_flag else None, labels="last-hidden")
    store, model = Store.open(tmp_path / "store"), load_target(tmp_path / "target", dtype=dtype)
    documents, ids = padded_batches(store)[0]
    with torch.inference_mode():
        assert text_model(model)(input_ids=ids).last_hidden_state.dtype == getattr(torch, dtype)
    layers, last, logits = own_forward(model, ids)
    row = rows_of(store)[documents[0]]
    n = len(row["labels"])
    expected = torch.cat([layers[t][0, :n].bfloat16() for t in (1, 2, 3)], dim=-1)
    assert torch.equal(bfloat16(row["hidden"]), expected)
    assert torch.equal(bfloat16(row["last"]), last[0, :n].bfloat16())
    assert np.array_equal(row["labels"][1:], logits[0, : n - 1].argmax(-1))
    assert store.meta.target["dtype"] == dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [{}, {"storage": "int8", "labels": "topk:4"}, {"labels": "last-hidden"}])
def test_on_a_gpu(settings: dict[str, Any], tmp_path: Path) -> None:
    """The same contract through device stages, the copy stream and pinned buffers that go round many times."""
    target = make_tiny(tmp_path / "target", "qwen3", dtype=torch.bfloat16)
    lengths = np.random.default_rng(1).integers(5, 49, 100).tolist()
    data = write_tokens(tmp_path / "data.jsonl", lengths)
    run(target, data, tmp_path / "store", device="cuda", layers=(0, 5), **settings)
    assert verify(tmp_path / "store")["ok"]
    store, model = Store.open(tmp_path / "store"), load_target(target, device="cuda")
    rows = rows_of(store)
    for documents, ids in padded_batches(store):
        layers, last, logits = own_forward(model, ids.cuda())
        for i, document in enumerate(documents):
            row, n = rows[document], len(store.documents[document][0])
            if "scale" not in row:
                expected = torch.cat([layers[tap][i, :n] for tap in (0, 5)], dim=-1)
                assert torch.equal(bfloat16(row["hidden"]), expected.cpu())
            if "last" in row:
                assert torch.equal(bfloat16(row["last"]), last[i, :n].cpu())
            top = logits[i, : n - 1].float().topk(2).values.cpu()
            clear = top[:, 0] - top[:, 1] > 0.02 * top[:, 0].abs()
            own = logits[i, : n - 1].argmax(-1).cpu()
            assert torch.equal(torch.from_numpy(row["labels"][1:])[clear].long(), own[clear])
    for worker in ("1/2", "0/2"):
        if worker == "1/2":
            shutil.copytree(tmp_path / "store", tmp_path / "again")
            shutil.rmtree(tmp_path / "again" / "index")
            (tmp_path / "again" / "index").mkdir()
            for shard in (tmp_path / "again" / "shards").glob("*/*"):
                shutil.rmtree(shard)
        run(target, data, tmp_path / "again", device="cuda", layers=(0, 5), worker=worker, **settings)
    assert content_of(tmp_path / "again") == content_of(tmp_path / "store")


@pytest.mark.parametrize(
    ("text", "value"),
    [("2TB", 2 * 10**12), ("500 GB", 500 * 10**9), ("1.5GiB", 3 * 2**29), ("123", 123), ("10k", 10_000)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_size, "lots"),
        (parse_size, "-1GB"),
        (parse_share, "2"),
        (parse_share, "x%"),
        (parse_worker, "2/2"),
        (parse_worker, "1"),
    ],
)
def test_wrong_words_are_refused(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(DflashError, match=text):
        read(text)


def test_shares_and_workers() -> None:
    assert parse_share("1%") == parse_share("0.01") == 0.01
    assert parse_worker("3/8") == (3, 8)


def test_no_matrix_of_tokens_by_vocabulary_exists(
    tiny_target: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever an operation puts out while extracting has the vocabulary's width for a chunk of positions at most."""
    monkeypatch.setattr(states, "TOP_K_CHUNK", 7)
    widest: dict[str, int] = {}
    running = states.Extractor.run

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == 320:
                    owner = "weight" if tensor.untyped_storage().data_ptr() in weights else "made"
                    widest[owner] = max(widest.get(owner, 0), tensor.numel() // 320)
            return out

    def watched(self: states.Extractor, stage: states.Stage) -> None:
        assert self.labeller is not None
        weights.add(self.labeller.weight.untyped_storage().data_ptr())
        with Watch():
            running(self, stage)

    weights: set[int] = set()
    monkeypatch.setattr(states.Extractor, "run", watched)
    run(tiny_target, data, tmp_path / "store", labels="topk:3")
    assert widest["made"] == 7


def test_memory_is_the_pools_and_stays_so(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few buffers, made once, go round through all batches; the process does not grow with their number."""
    data = write_tokens(tmp_path / "data.jsonl", [24] * 300)
    made: list[states.Stage] = []
    used: set[int] = set()
    resident: list[int] = []
    init, forward = states.Stage.__init__, states.Extractor.run

    def counted(self: states.Stage, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    def watched(self: states.Extractor, stage: states.Stage) -> None:
        used.add(stage.arrays["hidden"].data_ptr())
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        forward(self, stage)

    monkeypatch.setattr(states.Stage, "__init__", counted)
    monkeypatch.setattr(states.Extractor, "run", watched)
    run(tiny_target, data, tmp_path / "store", forward_tokens=24)
    assert len(resident) == 300
    assert len(made) == pipeline.BUFFERS["cpu"]
    assert used == {stage.flat["hidden"].data_ptr() for stage in made}
    assert resident[-1] - resident[50] < 8 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_allocates_nothing_once_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny(tmp_path / "target", "qwen3", dtype=torch.bfloat16)
    data = write_tokens(tmp_path / "data.jsonl", [48] * 100 + [24] * 100)
    counts: list[tuple[int, int]] = []
    forward = states.Extractor.run

    def watched(self: states.Extractor, stage: states.Stage) -> None:
        forward(self, stage)
        stats = torch.cuda.memory_stats()
        counts.append((stats["num_device_alloc"], stats["reserved_bytes.all.current"]))

    monkeypatch.setattr(states.Extractor, "run", watched)
    run(target, data, tmp_path / "store", device="cuda", forward_tokens=48)
    assert len(counts) == 150
    assert len(set(counts[5:])) == 1
