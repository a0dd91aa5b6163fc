"""Names of store types, and the ways in which scripts reach ``create``."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import ArgumentTypeError, UnknownTypeError
from kvstore.kvstore import STORE_TYPES
from kvstore.stores.local.device import DeviceKVStore
from kvstore.stores.local.store import LocalKVStore


@pytest.mark.parametrize("create", [mx.create, mx.kvstore.create, mx.kv.create])
def test_scripts_reach_create_by_every_name_of_the_original(create: Any) -> None:
    store = create("local")
    store.init("w", np.ones(2))
    assert isinstance(store, mx.KVStore)
    assert store.type == "local"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("local", LocalKVStore),
        ("local_update_cpu", LocalKVStore),
        ("LOCAL_allreduce_cpu", LocalKVStore),
        ("device", DeviceKVStore),
        ("Local_AllReduce_Device", DeviceKVStore),
    ],
)
def test_the_type_is_the_given_name_in_lower_case(name: str, kind: type) -> None:
    store = mx.create(name)
    assert type(store) is kind
    assert store.type == name.lower()


def test_the_default_is_local() -> None:
    assert mx.create().type == "local"


@pytest.mark.parametrize("name", ["FooBar", "", "dist_anything", "mydevice", "nccl", " local"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownTypeError, match=r"local, .*device, .*dist_device_async") as raised:
        mx.create(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("name", [None, 3, b"local"])
def test_a_name_must_be_a_string(name: Any) -> None:
    with pytest.raises(TypeError, match="name must be a string"):
        mx.create(name)


def test_a_local_store_takes_no_options() -> None:
    with pytest.raises(ArgumentTypeError, match="does not take options, got node"):
        mx.create("local", node=None)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("dist", "dist_sync"),
        ("Dist_Sync", "dist_sync"),
        ("dist_device", "dist_device_sync"),
        ("dist_sync_device", "dist_device_sync"),
        ("dist_async", "dist_async"),
        ("dist_async_device", "dist_device_async"),
    ],
)
def test_distributed_names_reach_their_store_with_the_options(
    monkeypatch: pytest.MonkeyPatch, name: str, canonical: str
) -> None:
    stand_in: Any = types.ModuleType("kvstore.stores.dist.store")
    stand_in.create_dist = lambda *names, **options: (names, options)
    monkeypatch.setitem(sys.modules, "kvstore.stores.dist.store", stand_in)
    made: Any = mx.create(name, node="n")
    assert made[0] == (canonical, name.lower())
    assert made[1]["node"] == "n"


def test_the_model_module_is_imported_when_it_is_first_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = types.ModuleType("kvstore.mxnet.model")
    monkeypatch.delattr(mx, "model", raising=False)
    monkeypatch.setitem(sys.modules, "kvstore.mxnet.model", stand_in)
    assert mx.model is stand_in
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = mx.modle


def test_the_package_has_a_version() -> None:
    assert mx.__version__ == "0.1.0"


def test_a_name_that_is_nearly_one_is_suggested() -> None:
    with pytest.raises(UnknownTypeError, match=r"; did you mean 'dist_sync'\?$"):
        mx.create("Dist_Snyc")


def test_plug_ins_stand_last_among_the_known_types() -> None:
    with pytest.raises(UnknownTypeError) as raised:
        mx.create("nccl")
    listed = str(raised.value).partition("known types: ")[2].split(", ")
    plug_ins = listed[len(STORE_TYPES) :]
    assert listed[: len(STORE_TYPES)] == list(STORE_TYPES)
    assert {"teststore", "horovod", "byteps", *mx.KVStoreBase.kv_registry} == set(plug_ins)


def test_a_store_shows_what_it_is_and_never_raises() -> None:
    store = mx.create("Device")
    assert repr(store) == "<device store: rank 0 of 1, 0 keys>"
    store.init("w", np.ones(2))
    assert repr(store) == "<device store: rank 0 of 1, 1 key>"
    store.close()
    assert repr(store) == "<device store: rank 0 of 1, 1 key, closed>"
    half_made = object.__new__(type(store))
    assert repr(half_made) == "<? store: rank 0 of 1, ? keys>"


def test_dir_lists_the_api_and_nothing_else() -> None:
    assert dir(mx) == sorted(mx.__all__)
    assert all(hasattr(mx, name) for name in dir(mx))
    assert not [name for name in dir(mx) if name.startswith("_") and name != "__version__"]


def test_the_names_that_type_checkers_see_are_those_that_are_imported_on_first_use() -> None:
    tree = ast.parse(Path(mx.__file__).read_text(encoding="utf-8"))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {
        name.asname: f"{node.module}.{name.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assigned = {
        ast.unparse(node.targets[0]): imported.get(
            ast.unparse(node.value), f"kvstore.{ast.unparse(node.value)}"
        )
        for node in block.body
        if isinstance(node, ast.Assign)
    }
    members = {name: f"{module}.{name}" for name, module in mx._MEMBERS.items()}
    # Type checkers know the layers on frameworks too, which need these and are not in ``__all__``.
    known = [*mx.__all__, "horovod", "jax", "lightning", "torch"]
    public = {name: mx._PUBLIC[name] for name in mx._PUBLIC if name in known}
    own = {name: f"kvstore.{name}" for name in mx._OWN}
    assert imported | assigned == own | public | members


@pytest.mark.parametrize("module", ["kvstore", "kvstore.launch.cli", "kvstore.status"])
def test_what_starts_jobs_and_looks_at_them_does_not_import_numpy(module: str) -> None:
    code = f"import {module}, sys; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", sorted(mx._PUBLIC))
def test_a_public_module_is_one_module_under_both_its_names(name: str) -> None:
    place = mx._PUBLIC[name]
    if name == "lightning":
        pytest.importorskip("lightning")  # the slow tests have it
    module = importlib.import_module(f"kvstore.{name}")
    assert module is importlib.import_module(place) is getattr(mx, name)
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == place


def test_public_names_are_imported_in_every_form_that_scripts_use() -> None:
    """Also before the place itself was imported, which takes a process of its own."""
    script = (
        "import kvstore.gluon.utils\n"
        "from kvstore.gluon import Trainer, utils\n"
        "from kvstore.gluon.utils import split_and_load\n"
        "from kvstore import nd, gluon\n"
        "import kvstore.model as model, kvstore.base\n"
        "import kvstore.mxnet.gluon.utils as real\n"
        "assert utils is real is kvstore.gluon.utils is gluon.utils\n"
        "assert kvstore.base.KVStore is kvstore.KVStore\n"
        "import importlib, pickle\n"
        "assert importlib.reload(kvstore.gluon) is kvstore.mxnet.gluon\n"
        "assert pickle.loads(pickle.dumps(Trainer)) is Trainer\n"
        "try:\n"
        "    import kvstore.gluon.trainers\n"
        "except ModuleNotFoundError as error:\n"
        "    assert error.name == 'kvstore.gluon.trainers', error.name\n"
        "else:\n"
        "    raise AssertionError('there is no such module')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
