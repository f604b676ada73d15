"""The import rules, read from the syntax trees: core never imports a stage, no stage another, none by its bare name."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("data", "extract", "train")
HEAVY = ("torch", "transformers", "zarr", "numpy", "numcodecs", "safetensors", "rich")


def sources() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of the program; through the symlinks as `dflash.data` and so on."""
    for base, prefix in [(ROOT / "dflash", "dflash"), *((ROOT / stage, f"dflash.{stage}") for stage in STAGES)]:
        for folder, folders, files in os.walk(base):  # follows no symlink, so dflash/data is not met twice
            folders[:] = [each for each in folders if each != "__pycache__"]
            for file in files:
                if file.endswith(".py"):
                    path = Path(folder) / file
                    parts = path.relative_to(base).with_suffix("").parts
                    yield ".".join([prefix, *(part for part in parts if part != "__init__")]), path


def imports(path: Path, name: str) -> Iterator[tuple[str, bool]]:
    """(imported dotted name, is it at the top of the module) for every import; `from a import b` gives a.b."""
    tree = ast.parse(path.read_text())
    top = set(ast.walk(ast.Module(body=[each for each in tree.body if not _is_scope(each)], type_ignores=[])))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node in top


def _is_scope(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def stage_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "dflash" and parts[1] in STAGES else None


def violations(name: str, imported: str, at_top: bool) -> str | None:
    """What is wrong with module `name` importing `imported`, or None."""
    if imported.split(".")[0] in STAGES:
        return f"{name} imports {imported}: the bare name of a stage"
    target, own = stage_of(imported), stage_of(name)
    if target is None or target == own:
        return None
    if name.startswith("dflash.cli"):
        is_config = imported.split(".")[2:3] == ["config"]
        return None if is_config or not at_top else f"{name} imports {imported} before its command runs"
    return f"{name} imports {imported}: " + ("one stage another" if own else "core a stage")


def test_imports_run_one_way() -> None:
    found = list(sources())
    assert {"dflash.cli.commands", "dflash.config"} <= {name for name, _ in found}
    wrong = [
        problem
        for name, path in found
        for imported, at_top in imports(path, name)
        if (problem := violations(name, imported, at_top))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("dflash.store.meta", "from dflash.train import run", True),
        ("dflash.store.meta", "def f():\n    import dflash.data.prepare", True),
        ("dflash.train.run", "from dflash.extract.config import ExtractConfig", True),
        ("dflash.train.run", "from train import run", True),
        ("dflash.train.run", "import data.config", True),
        ("dflash.train.run", "from ..extract import run", True),
        ("dflash.train.run", "from .config import TrainConfig", False),
        ("dflash.train.run", "from dflash.store import Store", False),
        ("dflash.cli.commands", "from dflash.train.run import train", True),
        ("dflash.cli.commands", "def f():\n    from dflash.train.run import train", False),
        ("dflash.cli.commands", "from dflash.train.config import TrainConfig", False),
        ("dflash.evaluate.run", "from dflash.data.prompts import read_prompts", True),
    ],
)
def test_the_rule_itself_tells_right_from_wrong(tmp_path: Path, name: str, source: str, wrong: bool) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert any(violations(name, *each) for each in imports(path, name)) is wrong


def loaded_by(statement: str) -> dict[str, str]:
    """{module: file} that a fresh interpreter has loaded after `statement`."""
    code = f"""
import sys
{statement}
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None):
        print(name, module.__file__, sep="\\t")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    return dict(line.split("\t") for line in done.stdout.splitlines() if "\t" in line)


def test_no_file_is_loaded_under_two_names() -> None:
    names = [name for name, _ in sources() if not name.endswith("__main__")]
    everything = "import " + ", ".join(names)
    ours = [os.path.realpath(file) for name, file in loaded_by(everything).items() if Path(file).is_relative_to(ROOT)]
    ours = [file for file in ours if ".venv" not in Path(file).parts]
    assert len(ours) >= len(names)
    assert len(ours) == len(set(ours)), sorted(file for file in ours if ours.count(file) > 1)


def test_the_config_modules_and_the_command_line_load_nothing_heavy() -> None:
    loaded = loaded_by("import dflash.cli")
    assert {"dflash.data.config", "dflash.extract.config", "dflash.train.config"} <= set(loaded)
    assert not [name for name in HEAVY if name in loaded]


def test_that_check_sees_a_heavy_module() -> None:
    assert "numpy" in loaded_by("import dflash.cli, numpy")
