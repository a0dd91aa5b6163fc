"""Mistakes in the structure of the source, and in what checks it."""

from __future__ import annotations

from tests.planted.bug import Bug

BUGS = [
    Bug(
        "a module imports one of a layer above it",
        "kvstore/arrays/keys.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\n\ndef upwards() -> None:\n"
        "    import kvstore.stores.base\n\n\n",
        "tests/unit/test_layers.py",
    ),
    Bug(
        "the protocol imports the node",
        "pslite/protocol/surveys.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\n\ndef upwards() -> None:\n"
        "    import pslite.node.log\n\n\n",
        "tests/unit/test_import_arrows.py",
    ),
    Bug(
        "a second door to msgpack is open",
        "kvstore/protocol/requests.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nimport msgpack  # noqa\n",
        "tests/unit/test_import_arrows.py",
    ),
    Bug(
        "the arrows do not see what is imported in a function",
        "tests/unit/test_layers.py",
        "for each in imports_of(ast.walk(parsed(source_of(name).read_text())))",
        "for each in imports_of(parsed(source_of(name).read_text()).body)",
        "tests/unit/test_layers.py",
    ),
    Bug(
        "a circle is found only where a module imports itself",
        "tests/unit/import_graph.py",
        "                ahead += graph[name]\n",
        "",
        "tests/unit/test_import_arrows.py",
    ),
    Bug(
        "a second class has the name of another",
        "kvstore/server/lanes.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\n\nclass Postoffice: ...\n\n\n",
        "tests/unit/test_class_names.py",
    ),
    Bug(
        "inner classes are not compared by name",
        "tests/unit/test_class_names.py",
        "for node in ast.walk(parsed(text)):",
        "for node in parsed(text).body:",
        "tests/unit/test_class_names.py",
    ),
    Bug(
        "a file is passed over whose only phrase goes on in the next line",
        "tools/prose.py",
        'PHRASE.search(_BETWEEN.sub(" ", text))',
        "PHRASE.search(text)",
        "tests/unit/test_prose.py",
    ),
    Bug(
        "a phrase that goes on in the next line is not found",
        "tools/prose.py",
        'if part.count("\\n") > 1 else " "',
        'if part.count("\\n") >= 1 else " "',
        "tests/unit/test_prose.py",
    ),
]
