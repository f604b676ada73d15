"""Export: the best checkpoint, checked by loading it again; it says what was trained; wrong pairs are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers_store import make_store
from make_tiny import make_tiny
from safetensors.torch import load_file, save_file

from dflash.checkpoint import Origin, read_config, read_document, read_drafter, write_drafter
from dflash.cli import cli
from dflash.drafter import Drafter, initialise
from dflash.errors import DflashError
from dflash.store import Store
from dflash.target import load_target
from dflash.train import export as module
from dflash.train.config import ExportConfig, TrainConfig
from dflash.train.export import export
from dflash.train.gate import check_taps, stored_rows
from dflash.train.run import train


def train_config(store: Path, run: Path, **changes: Any) -> TrainConfig:
    fields = {
        "store": str(store), "run": str(run), "num_layers": 1, "block_size": 4, "steps": 4, "mask_token": "7",
        "token_budget": 192, "eval_every": 2, "save_every": 1, "keep": 9,
    }  # fmt: skip
    return TrainConfig(**(fields | changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    make_store(folder / "store")
    train(train_config(folder / "store", folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, store and run of a tiny Gemma-2, which scales its embedding and caps its logits."""
    folder = tmp_path_factory.mktemp("gemma")
    make_tiny(folder / "target", "gemma2", rms_norm_eps=1e-5)
    args = {"enable_thinking": True}  # as `regenerate` writes them
    lines = [
        {"prompt": f"Say {n}.", "response": f"{n}, {n + 1} and {n * 7}.", **({"template_args": args} if n else {})}
        for n in range(40)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["extract", "--target", folder / "target", "--data", folder / "data.jsonl", "--store", folder / "store"]
    result = CliRunner().invoke(cli, [*map(str, words), "--layers", "1,3", "--buckets", "64,96", "--holdout", "0.1"])
    assert result.exit_code == 0, result.stderr
    train(train_config(folder / "store", folder / "run", steps=1, mask_token="300"))
    return folder


def test_a_run_gives_its_best_checkpoint_in_the_layout(run: Path, tmp_path: Path) -> None:
    result = export(ExportConfig(source=str(run), out=str(tmp_path / "out")))
    assert result["why"].startswith("the best on held-out rows")
    best = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())["best"]
    assert (result["step"], result["acceptance_length"]) == (best["step"], best["acceptance_length"])
    config, tensors = read_drafter(tmp_path / "out")
    assert (config.block_size, config.taps, config.mask_token_id) == (4, (1, 2, 3), 7)
    assert result["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert result["rounding"] < 0.02
    assert result["same_drafts"] > 0.9
    assert not list(tmp_path.glob(".*"))


def test_an_older_checkpoint_that_is_better_is_taken_and_the_newest_told(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-000004" / "state.json"
    state = json.loads(path.read_text())
    better = {"step": 2, "acceptance_length": {"pooled": 3.5, "macro": 3.4}}
    path.write_text(json.dumps(state | {"best": better}))
    result = export(ExportConfig(source=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert result["step"] == 2
    newest = state["validation"]["acceptance_length"]["pooled"]
    assert result["why"].endswith(f"acceptance length 3.50, the newest (step 4) has {newest:.2f}")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    result = export(ExportConfig(source=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert (result["step"], result["why"]) == (4, "the newest: step 2, the best with acceptance length 3.50, is gone")


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_what_was_trained_is_what_the_export_says(gemma: Path, tmp_path: Path, layout: str) -> None:
    result = export(ExportConfig(source=str(gemma / "run"), out=str(tmp_path / "out"), layout=layout))
    target = json.loads((gemma / "target" / "config.json").read_text())
    document = read_document(tmp_path / "out")
    layer = document.get("transformer_layer_config", document)
    assert layer["rms_norm_eps"] == target["rms_norm_eps"] == 1e-5
    assert layer["max_position_embeddings"] == target["max_position_embeddings"]
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
    assert layer["vocab_size"] == target["vocab_size"]
    config, origin = read_config(tmp_path / "out")
    assert (config.taps, config.mask_token_id, config.num_target_layers) == ((1, 3), 300, 6)
    assert origin is not None
    assert (origin.embed_factor, origin.softcap, origin.logit_scale) == (8.0, 2.0, 1.0)
    meta = Store.open(gemma / "store").meta
    assert (origin.weights, origin.tokenizer, origin.template) == (
        meta.target["weights"],
        meta.tokenizer,
        meta.template,
    )
    assert origin.template_args == {"enable_thinking": True}
    assert origin.step == result["step"]
    if layout == "speculators":
        tensors, own = load_file(tmp_path / "out" / "model.safetensors"), load_file(gemma / "target/model.safetensors")
        embed = own["model.embed_tokens.weight"]
        assert torch.equal(tensors["embed_tokens.weight"], (embed * 8.0).bfloat16())
        assert torch.equal(tensors["lm_head.weight"], embed.bfloat16())


def test_a_layout_that_leaves_the_embedding_factor_to_the_server_says_so(
    gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(ExportConfig(source=str(gemma / "run"), out=str(tmp_path / "a")))
    assert "multiplies its embedding by 8, for which the z-lab layout has no field" in capsys.readouterr().err
    assert "multiplies its embedding by 8" in (tmp_path / "a" / "README.md").read_text()
    export(ExportConfig(source=str(gemma / "run"), out=str(tmp_path / "b"), layout="speculators"))
    assert "multiplies" not in capsys.readouterr().err


def scaled(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, folder / "model.safetensors")


def swapped(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    up, gate = (f"layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    save_file(tensors | {up: tensors[gate], gate: tensors[up]}, folder / "model.safetensors")


def said(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    layer = document.get("transformer_layer_config", document)
    layer.update(changes)
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: scaled(folder, "fc.weight"), "gives other logits"),
        (lambda folder: scaled(folder, "layers.0.self_attn.k_norm.weight"), "gives other logits"),
        (swapped, "gives other logits"),
        (lambda folder: said(folder, rms_norm_eps=1e-3), "does not say what was trained: rms_norm_eps"),
        (
            lambda folder: said(folder, rope_theta=5e5, rope_parameters=None),
            "does not say what was trained: rope_theta",
        ),
        (lambda folder: said(folder, max_position_embeddings=9), "max_position_embeddings"),
    ],
)
def test_the_gate_refuses_a_folder_that_drafts_otherwise(
    run: Path,
    tmp_path: Path,
    layout: str,
    damage: Callable[[Path], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write_and_damage(folder: Path, *arguments: Any) -> None:
        write_drafter(folder, *arguments)
        damage(folder)

    monkeypatch.setattr(module, "write_drafter", write_and_damage)
    with pytest.raises(DflashError, match=message):
        export(ExportConfig(source=str(run), out=str(tmp_path / "out"), layout=layout))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_the_gate_sees_wrong_copies_of_the_targets_tensors(
    run: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_damage(folder: Path, *arguments: Any) -> None:
        write_drafter(folder, *arguments)
        scaled(folder, name)

    monkeypatch.setattr(module, "write_drafter", write_and_damage)
    with pytest.raises(DflashError, match="gives other logits"):
        export(ExportConfig(source=str(run), out=str(tmp_path / "out"), layout="speculators"))


def test_the_live_target_is_compared_with_the_stored_states(gemma: Path, tmp_path: Path) -> None:
    config = ExportConfig(source=str(gemma / "run"), out=str(tmp_path / "out"), target=str(gemma / "target"))
    checked = export(config)["taps_checked"]
    assert checked["rows"] == 4
    assert 0 < checked["relative_error"] < 4e-3  # the store's bfloat16


def test_a_tap_off_by_one_is_named_with_the_layer_that_it_is(gemma: Path) -> None:
    store = Store.open(gemma / "store")
    model = load_target(gemma / "target")
    with pytest.raises(DflashError, match=r"tap 2 .*at layer 2: off by .*nearest to layer 1 \(off by 0\.\d%\)"):
        check_taps(model, "T", (2, 4), stored_rows(store), "bf16")
    with pytest.raises(DflashError, match=r"tap 3.*nearest to layer 1"):
        check_taps(model, "T", (3, 1), stored_rows(store), "bf16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, r"with the weights \w+, but .*other has the weights"),
        ({"hidden_size": 32}, r"with hidden size 64, but target .*other has 32"),
        ({"num_hidden_layers": 5}, r"with number of layers 6, but target .*other has 5"),
    ],
)
def test_another_target_is_refused_with_both_sides(
    gemma: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    other = make_tiny(tmp_path / "other", "gemma2", **({"rms_norm_eps": 1e-5} | changes))
    with pytest.raises(DflashError, match=message) as caught:
        export(ExportConfig(source=str(gemma / "run"), out=str(tmp_path / "out"), target=str(other)))
    assert f"trained for {gemma / 'target'} with" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_card_says_what_serving_and_judging_need(run: Path, tmp_path: Path) -> None:
    export(ExportConfig(source=str(run), out=str(tmp_path / "out")))
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (
        "base_model: synthetic", "w" * 64, "- documents: 40", "Step 4 of 4.", "- lr: 0.0006", "- loss: ce",
        "pooled", "macro", "accepted drafts + 1", "| slot | accepted |", "vllm serve synthetic --speculative-config",
        '"num_speculative_tokens": 3', "sglang.launch_server", "--speculative-draft-model-path", "## Licence",
        "theta 10000", "mask token: 7", "[1, 2, 3]",
    ):  # fmt: skip
        assert words in card, words
    assert max(map(len, card.splitlines()[:30])) < 400


def test_sliding_and_full_layers_go_where_a_layout_can_say_them(run: Path, tmp_path: Path) -> None:
    store = run.parent / "store"
    train(train_config(store, tmp_path / "run", steps=1, num_layers=2, sliding_window=8))
    export(ExportConfig(source=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert read_config(tmp_path / "out")[0].layer_types == ("sliding_attention", "full_attention")
    assert "V2 model runner" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(DflashError, match="full and sliding layers together"):
        export(ExportConfig(source=str(tmp_path / "run"), out=str(tmp_path / "two"), layout="speculators"))
    assert not (tmp_path / "two").exists()


def test_a_checkpoint_between_validations_claims_no_acceptance(run: Path, tmp_path: Path) -> None:
    result = export(ExportConfig(source=str(run / "checkpoints" / "step-000003"), out=str(tmp_path / "out")))
    assert (result["step"], result["why"], result["acceptance_length"]) == (3, "it was named", None)
    assert "Not measured at this step" in (tmp_path / "out" / "README.md").read_text()


def test_without_its_store_the_gate_takes_random_states(run: Path, gemma: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*/state.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"store": str(tmp_path / "gone")}))
    source = str(tmp_path / "run")
    assert "random" in export(ExportConfig(source=source, out=str(tmp_path / "out")))["checked_on"]
    with pytest.raises(DflashError, match="store of this run is gone; give --target synthetic"):
        export(ExportConfig(source=source, out=str(tmp_path / "two"), layout="speculators"))


def test_the_targets_own_tensors_stand_in_for_a_store_that_is_gone(
    gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The speculators layout needs them, and the message of the layout without them asks for --target."""
    shutil.copytree(gemma / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*/state.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"store": str(tmp_path / "gone")}))
    source, target = str(tmp_path / "run"), str(gemma / "target")
    result = export(ExportConfig(source=source, out=str(tmp_path / "out"), layout="speculators", target=target))
    assert "random" in result["checked_on"]
    assert "only files of --target were compared" in capsys.readouterr().err
    own = load_file(gemma / "target/model.safetensors")["model.embed_tokens.weight"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], (own * 8.0).bfloat16())
    with pytest.raises(DflashError, match="are gone; leave the flag out"):
        export(ExportConfig(source=source, out=str(tmp_path / "two"), target=target))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), "bfloat16", "The checkpoint's own logits on .* are not finite; export another checkpoint"),
        (1e6, "float16", "Stored as float16, .* are not finite; export it with --dtype bfloat16"),
    ],
)
def test_weights_that_are_not_finite_are_refused_with_their_cause(
    run: Path, tmp_path: Path, value: float, dtype: str, message: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-000004"
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DflashError, match=message):
        export(ExportConfig(source=str(folder), out=str(tmp_path / "out"), dtype=dtype))


def test_an_export_is_replaced_and_at_no_moment_half_deleted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExportConfig(source=str(run), out=str(tmp_path / "out"))
    export(config)
    delete = shutil.rmtree

    def killed(folder: Path, **more: Any) -> None:
        if (Path(folder) / "config.json").exists() and "partial" not in str(folder):
            (Path(folder) / "config.json").unlink()
            raise KeyboardInterrupt
        delete(folder, **more)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        export(config)
    assert read_drafter(tmp_path / "out")
    monkeypatch.undo()
    export(config)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_a_foreign_drafter_and_an_export_with_notes_are_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep")
    for name in ("foreign", "noted"):
        export(ExportConfig(source=str(run), out=str(tmp_path / name)))
    document = json.loads((tmp_path / "foreign" / "config.json").read_text())
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(document | {"dflash": None}))
    (tmp_path / "noted" / "notes.md").write_text("keep")
    for name in ("file", "foreign", "noted"):
        with pytest.raises(DflashError, match="no export"):
            export(ExportConfig(source=str(run), out=str(tmp_path / name)))


def test_a_checkpoint_named_from_within_its_folder_is_exported_into_its_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run" / "checkpoints")
    export(ExportConfig(source="step-000004"))
    assert (tmp_path / "run" / "export" / "config.json").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(ExportConfig(source=str(run), out="."))
    assert (tmp_path / "here" / "config.json").exists()


def test_a_folder_with_other_files_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DflashError, match="no export"):
        export(ExportConfig(source=str(run), out=str(tmp_path)))
    assert (tmp_path / "mine.txt").read_text() == "keep"


def start(folder: Path, run: Path, tmp_path: Path, origin: Origin | None = None, **changes: Any) -> None:
    """Train from a drafter of the run's shape (but for `changes`), written with `origin`."""
    config = module.shape_of(module.choose_checkpoint(run)[0])
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__} | changes
    shape = type(config)(**fields)
    drafter = Drafter(shape)
    initialise(drafter, seed=5)
    folder.mkdir()
    write_drafter(folder, shape, dict(drafter.named_parameters()), "float32", origin=origin)
    train(train_config(run.parent / "store", tmp_path / "run", steps=1, init_from=str(folder)))


def test_starting_from_a_drafter_of_another_shape_or_tokenizer_names_both(run: Path, tmp_path: Path) -> None:
    origin = Origin(target="org/other", num_target_layers=6, tokenizer="o" * 64)
    with pytest.raises(
        DflashError, match=r"a drafter of org/other, has hidden_size 32, but this run of synthetic has 64"
    ):
        start(tmp_path / "a", run, tmp_path, origin, hidden_size=32)
    with pytest.raises(DflashError, match=r"org/other with the tokenizer oooo.* but synthetic .* the tokenizer tttt"):
        start(tmp_path / "b", run, tmp_path, origin)


def test_starting_from_a_drafter_of_another_target_or_template_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = Origin(target="org/other", num_target_layers=6, weights="f" * 64, template_args={"enable_thinking": True})
    start(tmp_path / "a", run, tmp_path, origin)
    told = capsys.readouterr().err
    assert "org/other with the weights ffffffffffff, but synthetic" in told
    assert 'template arguments {"enable_thinking": true}, but here they are {}' in told


def test_a_drafter_in_the_speculators_layout_starts_a_run(run: Path, tmp_path: Path) -> None:
    export(ExportConfig(source=str(run), out=str(tmp_path / "out"), layout="speculators"))
    train(train_config(run.parent / "store", tmp_path / "run", steps=0, init_from=str(tmp_path / "out")))
    _, written = read_drafter(tmp_path / "out")
    begun = load_file(tmp_path / "run" / "checkpoints" / "step-000000" / "model.safetensors")
    assert all(torch.equal(begun[name], tensor.float()) for name, tensor in written.items())
