"""What an installation holds: real files for the symlinked stages, package data, no bare `data` in site-packages."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("data", "extract", "train")
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]
for build in (build_meta.build_sdist, build_meta.build_wheel):
    build(out)
build_meta.build_editable(out + "/editable")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist, wheel and editable wheel, built from a copy so that no build/ litters the checkout."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("built")
    (out / "editable").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("dflash", *STAGES):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def modules() -> set[str]:
    """The files of the checkout as an installation names them."""
    found = set()
    for base, prefix in [(ROOT / "dflash", "dflash"), *((ROOT / stage, f"dflash/{stage}") for stage in STAGES)]:
        for folder, _, files in os.walk(base):
            found |= {
                f"{prefix}/{(Path(folder) / file).relative_to(base)}"
                for file in files
                if file.endswith(".py") or (prefix == "dflash/data" and file.endswith(".jsonl"))
            }
    return found


def test_the_symlinks_are_relative_and_point_at_the_stages() -> None:
    for stage in STAGES:
        assert os.readlink(ROOT / "dflash" / stage) == f"../{stage}"


def test_the_wheel_holds_every_file_once_and_nothing_at_its_top_but_the_package(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    assert {"dflash/data/quickstart.jsonl", "dflash/data/quickstart_eval.jsonl", "dflash/train/config.py"} <= modules()
    assert {name for name in names if ".dist-info/" not in name} == modules()
    assert len(names) == len(set(names))


def test_the_sdist_holds_real_files(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        members = sdist.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members}
    assert modules() <= names
    assert {"LICENSE", "pyproject.toml"} <= names


def test_an_installed_wheel_imports_without_the_checkout(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import importlib.util, dflash.cli, dflash.data, dflash.extract.config, dflash.train.config\n"
        "print(dflash.data.__file__, [importlib.util.find_spec(name) for name in ('data', 'extract', 'train')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    assert done.stdout.split(maxsplit=1) == [str(tmp_path / "dflash/data/__init__.py"), "[None, None, None]\n"]


def test_an_editable_install_shows_only_the_package(built: Path) -> None:
    with zipfile.ZipFile(next((built / "editable").glob("*.whl"))) as wheel:
        finder = next(name for name in wheel.namelist() if name.endswith("_finder.py"))
        mapping = next(line for line in wheel.read(finder).decode().splitlines() if line.startswith("MAPPING"))
    assert mapping.count("'dflash': ") == 1
    for stage in STAGES:
        assert f"'{stage}'" not in mapping
