"""The module that ``import torch`` calls: it registers, replaces names, and breaks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore_torch_autoload as autoload

ROOT = Path(__file__).resolve().parents[4]

pytest.importorskip("torch")


def run(code: str, *paths: Path, **settings: str) -> str:
    """What a fresh interpreter prints that finds modules in ``paths`` before the project's."""
    path = os.pathsep.join([*map(str, paths), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **settings},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def installed(folder: Path, module: str = "kvstore_torch_autoload") -> Path:
    """A folder with the entry point that an installation has."""
    metadata = folder / "kvstore_planted-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstore-planted\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nplanted = {module}:autoload\n")
    return folder


def test_the_entry_point_is_the_one_in_the_metadata_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert (
        '[project.entry-points."torch.backends"]\nkvstore = "kvstore_torch_autoload:autoload"\n'
        in text
    )
    assert 'py_modules=["kvstore_torch_autoload"]' in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        ("gloo", "kvstore"),
        ("GLOO", "kvstore"),
        ("nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:kvstore,cuda:nccl"),
        ("kvstore", "kvstore"),
    ],
)
def test_names_of_backends_are_replaced(backend: str, wanted: str) -> None:
    assert autoload.renamed(backend, {"gloo", "mpi"}) == wanted


def test_importing_torch_registers_the_backend_though_the_project_cannot_be_imported(
    tmp_path: Path,
) -> None:
    """Nothing of the project is imported before the first group is made."""
    for name in ("kvstore", "pslite"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('broken on purpose')\n")
    printed = run(
        "import torch, sys, torch.distributed as dist\n"
        "print('kvstore' in dist.Backend.backend_list, 'kvstore' in sys.modules, "
        "dist.Backend.default_device_backend_map['cpu'])\n"
        "try:\n"
        "    dist.init_process_group('kvstore', store=dist.HashStore(), rank=0, world_size=1)\n"
        "except RuntimeError as error:\n"
        "    print(error)",
        installed(tmp_path),
    )
    assert printed.splitlines() == ["True False gloo", "broken on purpose"]


def test_a_torch_in_which_nothing_can_be_registered_is_imported_all_the_same(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    assert run("import kvstore_torch_autoload as a; print(a.autoload())", tmp_path) == "None"


@pytest.mark.slow(reason="an interpreter that imports PyTorch for each name")
def test_scripts_that_name_another_backend_get_this_one_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    printed = run(
        "import torch, torch.distributed as dist\n"
        "from torch.distributed import distributed_c10d\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "part = dist.new_group([0], backend='mpi')\n"
        "print(dist.get_backend(), dist.get_backend(part), "
        "dist.Backend.default_device_backend_map['cpu'])\n"
        "x = torch.ones(2); dist.all_reduce(x); print(x.tolist())\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(x); print(dist.group.WORLD.name(), x.tolist())",
        installed(tmp_path),
        KVSTORE_TORCH_REPLACES="gloo,mpi",
    )
    assert printed.splitlines() == ["kvstore kvstore kvstore", "[1.0, 1.0]", "kvstore [1.0, 1.0]"]


@pytest.mark.slow(reason="the tests of PyTorch's calls have it for the backend")
def test_a_monitored_barrier_works_for_the_backend_and_still_for_gloo(tmp_path: Path) -> None:
    printed = run(
        "import torch.distributed as dist\n"
        "from torch.distributed.distributed_c10d import monitored_barrier\n"
        "for backend in ('kvstore', 'gloo'):\n"
        "    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)\n"
        "    part = dist.new_group([0])\n"
        "    dist.monitored_barrier()\n"
        "    dist.monitored_barrier(part, timeout=9.5, wait_all_ranks=True)\n"
        "    monitored_barrier(group=part)\n"
        "    print(dist.get_backend(part))\n"
        "    dist.destroy_process_group()\n"
        "try:\n"
        "    dist.monitored_barrier()\n"
        "except ValueError as error:\n"
        "    print(error)\n",
        installed(tmp_path),
    )
    kvstore, gloo, error = printed.splitlines()
    assert (kvstore, gloo) == ("kvstore", "gloo")
    assert "Default process group has not been initialized" in error


@pytest.mark.slow(reason="a process that imports PyTorch, for a version that few have")
def test_a_pytorch_that_loses_results_of_calls_is_refused(tmp_path: Path) -> None:
    printed = run(
        "import torch, torch.distributed as dist\n"
        "torch.__version__ = torch.torch_version.TorchVersion('2.6.0+cpu')\n"
        "try:\n"
        "    dist.init_process_group('kvstore', store=dist.HashStore(), rank=0, world_size=1)\n"
        "except NotImplementedError as error:\n"
        "    print(error)",
        installed(tmp_path),
    )
    assert "needs PyTorch 2.7 or later, this is 2.6.0+cpu" in printed


def test_importing_kvstore_imports_no_torch_and_its_backend_registers_itself() -> None:
    printed = run(
        "import sys, kvstore\n"
        "from kvstore import *\n"
        "print('torch' in sys.modules)\n"
        "import kvstore.torch, torch.distributed as dist\n"
        "found = kvstore.torch.ProcessGroupKVStore\n"
        "print('kvstore' in dist.Backend.backend_list, found.__name__)\n"
        "import kvstore.torch.work, kvstore.frameworks.torch.work as own\n"
        "print(kvstore.torch.work is own)",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert printed.splitlines() == ["False", "True ProcessGroupKVStore", "True"]
