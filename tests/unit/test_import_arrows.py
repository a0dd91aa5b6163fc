"""The arrows between modules, read from their source: who may import whom, and what has one door.

Imports within functions count. Those below ``if TYPE_CHECKING:`` count for circles and levels of
``pslite``, and not for the rest.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator

import pytest
from import_graph import ROOT, circles, imports_of, module_of, name_of, parsed, source_of

LEAVES = frozenset(
    {
        "pslite.errors",
        "pslite.ids",
        "pslite.config",
        "pslite.future",
        "pslite.resource_limits",
        "pslite.security",
        "pslite.version",
    }
)
#: Package -> what it may import of the project, besides itself.
LAYERS = {
    "pslite.wire": LEAVES,
    "pslite.protocol": LEAVES | {"pslite.wire.base", "pslite.wire.messages"},
    "pslite.van": LEAVES,
    "pslite.plane": LEAVES | {"pslite.protocol", "pslite.wire.base", "pslite.wire.messages"},
}
#: What ``kvstore`` may use of ``pslite``: its public part.
PUBLIC = frozenset(
    {
        "pslite",
        "pslite.collective.sums.check_op",
        "pslite.node.address.interface_address",
        "pslite.node.address.local_addresses",
        "pslite.node.address.machine_id",
        "pslite.node.customer",
        "pslite.errors",
        "pslite.future",
        "pslite.ids",
        "pslite.memory.segment.addresses",
        "pslite.node.log.try_to_stderr",
        "pslite.plane",
        "pslite.resource_limits.allow_files",
        "pslite.security.read_key",
        "pslite.wire.survey",
        "pslite.version",
        "pslite.wire.codec.pack_value",
        "pslite.wire.codec.unpack_value",
    }
)
CODE_LOADERS = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})


@functools.cache
def modules() -> dict[str, list[ast.AST]]:
    """Name -> all nodes of the module that run; read by the first test that asks."""
    return {
        name_of(path): list(nodes_of(parsed(path.read_text())))
        for package in ("pslite", "kvstore")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@functools.cache
def imports() -> dict[str, set[str]]:
    """Name of a module -> what it imports."""
    return {name: imports_of(nodes) for name, nodes in modules().items()}


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything in a module that runs: not the imports for type checkers only."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for node in child.orelse:
                yield from nodes_of(node)
        else:
            yield from nodes_of(child)


def is_within(name: str, packages: frozenset[str]) -> bool:
    """Whether ``name`` is one of these or lies in it."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def users(does: Callable[[ast.AST], bool]) -> set[str]:
    """The modules with a node that ``does`` something."""
    return {name for name, nodes in modules().items() if any(map(does, nodes))}


def importers(package: str) -> set[str]:
    return {
        name
        for name, imported in imports().items()
        if any(is_within(each, frozenset({package})) for each in imported)
    }


# -- layers -------------------------------------------------------------------------------


def test_the_runtime_knows_nothing_of_the_stores() -> None:
    assert {name for name in importers("kvstore") if name.startswith("pslite")} == set()


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_a_leaf_imports_leaves_only(leaf: str) -> None:
    ours = {name for name in imports()[leaf] if name.startswith("pslite")}
    assert {name for name in ours if not is_within(name, LEAVES)} == set()


@pytest.mark.parametrize("package", LAYERS)
def test_a_layer_imports_what_is_below_it_only(package: str) -> None:
    allowed = LAYERS[package] | {package}
    wrong = {
        f"{module} imports {name}"
        for module, imported in imports().items()
        if is_within(module, frozenset({package}))
        for name in imported
        if name.startswith(("pslite", "kvstore")) and not is_within(name, allowed)
    }
    assert wrong == set()


def test_the_protocol_takes_types_from_the_wire_and_nothing_that_runs() -> None:
    wanted = {
        name.removeprefix("pslite.wire.").removeprefix("base.").removeprefix("messages.")
        for module, imported in imports().items()
        if module.startswith("pslite.protocol")
        for name in imported
        if name.startswith("pslite.wire")
    }
    assert {name for name in wanted if not name[0].isupper()} == set()


def test_the_stores_use_the_public_part_of_the_runtime_only() -> None:
    public = PUBLIC - {"pslite"}
    names = set(_all_of("pslite"))
    wrong = {
        f"{module} imports {name}"
        for module, imported in imports().items()
        if module.startswith("kvstore")
        for name in imported
        if name.startswith("pslite.")
        and not is_within(name, public)
        and name.removeprefix("pslite.") not in names
    }
    assert wrong == set()


def _all_of(module: str) -> list[str]:
    """What a module says it offers (``__all__``)."""
    for node in modules()[module]:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


# -- circles and levels of the runtime ----------------------------------------------------

#: The runtime's parts from below: none imports one of a later line.
LEVELS = (
    ("errors", "ids", "config", "future", "version", "resource_limits", "security"),
    ("wire",),
    ("memory",),
    ("van",),
    ("protocol",),
    ("plane",),
    ("node",),
    ("apps",),
    ("collective",),
    ("testing",),
)


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Module of the runtime -> its other modules that it names, for type checkers too."""
    known = {name for name in modules() if name.startswith("pslite")}
    found: dict[str, set[str]] = {}
    for name in known:
        wanted = imports_of(ast.walk(parsed(source_of(name).read_text())))
        found[name] = {module_of(each, known) for each in wanted} - {name, ""}
    return found


def level_of(module: str) -> int:
    """The line of ``LEVELS`` that a module is in; ``pslite`` itself is above them all."""
    part = module.split(".")[1:2]
    return next((at for at, level in enumerate(LEVELS) if {*part} & {*level}), len(LEVELS))


def test_no_module_of_the_runtime_is_in_a_circle() -> None:
    assert circles(arrows()) == set()


def test_no_arrow_of_the_runtime_goes_up() -> None:
    assert {
        f"{module} imports {name}"
        for module, imported in arrows().items()
        for name in imported
        if level_of(name) > level_of(module)
    } == set()


def test_every_part_of_the_runtime_has_a_level() -> None:
    above = {name for name in arrows() if level_of(name) == len(LEVELS)}
    assert above == {"pslite"}


def test_a_circle_is_found_and_what_leads_to_it_is_not_in_it() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set[str]()}
    assert circles(graph) == {"b", "c"}


# -- one door each ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packages", "door"),
    [
        (("zmq",), "pslite.van.zmq."),
        (("msgpack",), "pslite.wire.codec kvstore.launch.agents.wire"),
        (("cupy", "cupyx"), "kvstore.arrays.cupy"),
        (
            ("torch",),
            "kvstore.arrays.torch kvstore.frameworks.torch. kvstore.frameworks.horovod.torch. "
            "kvstore.frameworks.lightning",
        ),
        (("lightning",), "kvstore.frameworks.lightning"),
        (("jax", "jaxlib"), "kvstore.arrays.jax kvstore.frameworks.jax"),
        (("ml_dtypes",), "kvstore.arrays.dtypes"),
    ],
    ids=["zmq", "msgpack", "cupy", "torch", "lightning", "jax", "ml_dtypes"],
)
def test_a_foreign_package_has_one_door(packages: tuple[str, ...], door: str) -> None:
    """A door that ends in a dot is a package; beside it, other doors are named in full.

    The launcher has frames of its own, since it imports nothing of the runtime.
    """
    users_of_it = set().union(*map(importers, packages))
    assert users_of_it
    rooms = tuple(each for each in door.split() if each.endswith("."))
    assert {name for name in users_of_it if not f"{name}.".startswith(rooms)} == set(
        door.split()
    ) - {*rooms}


def test_the_environment_is_read_by_the_settings_and_the_launcher_only() -> None:
    readers = users(_reads_environment)
    assert "pslite.config" in readers
    assert {name for name in readers if not name.startswith("kvstore.launch.")} == {"pslite.config"}


def _reads_environment(node: ast.AST) -> bool:
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    if isinstance(node, ast.Attribute):
        return node.attr in names and ast.unparse(node.value) == "os"
    return isinstance(node, ast.ImportFrom) and node.module == "os" and any(
        alias.name in names for alias in node.names
    )  # fmt: skip


# -- nothing that arrives is run ----------------------------------------------------------


def test_nothing_is_unpickled_but_the_files_of_run() -> None:
    """Which come from the user's own directory; nothing that has to do with peers uses them."""
    loaders = {name for package in CODE_LOADERS for name in importers(package)}
    assert loaders == {"kvstore.launch.run.call_files"}
    assert importers("kvstore.launch.run.call_files") == {
        "kvstore.launch.run",
        "kvstore.launch.run.background",
        "kvstore.launch.run.job",
        "kvstore.launch.run.worker",
    }


def test_nothing_is_evaluated() -> None:
    def evaluates(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec", "compile", "__import__")
        )

    assert users(evaluates) == set()


def test_no_array_is_loaded_with_its_pickles() -> None:
    def allows(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        )

    assert users(allows) == set()


# -- the reader itself --------------------------------------------------------------------


def test_every_way_to_import_is_seen_but_those_for_type_checkers() -> None:
    tree = ast.parse(
        "import a.b\n"
        "from c import d, e\n"
        "if TYPE_CHECKING:\n"
        "    import hidden\n"
        "else:\n"
        "    import f\n"
        "def late():\n"
        "    try:\n"
        "        from g.h import i as j\n"
        "    except ImportError:\n"
        "        import k\n"
    )
    assert imports_of(nodes_of(tree)) == {"a.b", "c.d", "c.e", "f", "g.h.i", "k"}


def test_every_module_of_both_packages_is_looked_at() -> None:
    assert {
        "pslite.node.postoffice",
        "pslite.van.zmq.van",
        "kvstore.stores.dist.store",
        "kvstore",
    } <= set(modules())
