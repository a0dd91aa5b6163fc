"""What `pip install .` installs: version, dependencies, extras, packages and the C extension.

Name, description, commands and addresses are in pyproject.toml, with the settings of the tools.
"""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """The version in pslite/version.py, which is read and not imported."""
    text = (ROOT / "pslite" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('pslite/version.py has no line of the form __version__ = "1.2.3"')
    return found.group(1)


# The lower bounds are the oldest versions with which the tests were run and passed (on Python
# 3.10, `make test-oldest`). Without upper bounds: newer ones are what users have.
REQUIREMENTS = ["numpy>=2.0", "pyzmq>=23.2.1", "msgpack>=1.0.3"]

# The documentation (`make docs`). The theme is the one of NumPy, SciPy and pandas. Sphinx gets new
# warnings with its versions, and warnings are errors there.
DOCUMENTATION = [
    "sphinx>=8.1,<10",
    "myst-parser>=4,<6",
    "pydata-sphinx-theme>=0.16.1,<1",
]

# Tools change what they complain about with every minor version, so that is held fixed.
DEVELOPMENT = [
    *DOCUMENTATION,
    "pytest>=9.0,<10",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.8,<4",
    "hypothesis>=6.150,<7",
    "ruff>=0.17.5,<0.18",
    "mypy>=2.4.1,<2.5",
    "pytest-cov>=7,<8",
    "coverage>=7.10",
    # Array libraries that the tests try: PyTorch comes from its own index (see the Makefile).
    "ml_dtypes>=0.5",
    "jax>=0.4.30",
    "optax>=0.2",
    "matplotlib>=3.8",
    "cloudpickle>=3.0",  # lambdas and notebooks' functions for kvstore.run
    "safetensors>=0.4.5",  # reads what our own writer has written, and the other way round
    "expecttest>=0.2",  # which PyTorch's own tests need (tests/frameworks)
    "kubernetes>=29.0",  # the client, which asks a server that the tests start
]

# What the tests of the launchers need besides (`make test-launchers`, tests/launchers/install).
LAUNCHERS = [
    "ray>=2.9",
    "ipykernel>=6.29",  # a notebook's kernel, and
    "jupyter-client>=8",  # what speaks with it
    "kubernetes-validate>=1.33",  # the published schemas, in the package itself
]

# An extra in C (docs/decisions/0011-optional-kernels.md): without a compiler, or where this fails,
# setuptools says so, and everything works without it. NumPy's bits depend on the flags: no fused
# multiply-add, no shortcuts, but arithmetic that need not set errno or raise a trap.
KERNELS = Extension(
    "kvstore.arrays.cpu._kernels",
    sources=["kvstore/arrays/cpu/native/kernels.c"],
    depends=[
        f"kvstore/arrays/cpu/native/{name}.h"
        for name in ("codecs", "coding_calls", "kernels", "loops", "row_calls", "rules")
    ],
    extra_compile_args=[
        "-O3",
        "-fno-fast-math",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
    ],
    libraries=["m"],
    optional=True,
)

setup(
    version=version(),
    packages=find_packages(include=["kvstore", "kvstore.*", "pslite", "pslite.*"]),
    py_modules=["kvstore_torch_autoload"],
    ext_modules=[KERNELS],
    package_data={"kvstore": ["py.typed"], "kvstore.arrays.cpu": ["*.pyi"], "pslite": ["py.typed"]},
    install_requires=REQUIREMENTS,
    extras_require={
        "bfloat16": ["ml_dtypes>=0.5"],
        "cuda12": ["cupy-cuda12x>=13"],
        "cuda13": ["cupy-cuda13x>=13.6"],
        # The bound is for tensors in stores; the backend refuses what is older than it needs.
        "torch": ["torch>=2.1", "ml_dtypes>=0.5"],  # NumPy's bfloat16, which tensors have
        "jax": ["jax>=0.4.30"],
        "lightning": ["lightning>=2.6,<3", "torch>=2.1", "ml_dtypes>=0.5"],
        "notebook": ["cloudpickle>=3.0"],
        "ray": ["ray>=2.9"],
        "kubernetes": ["kubernetes>=29.0"],
        "plot": ["matplotlib>=3.8"],
        "docs": DOCUMENTATION,
        "dev": DEVELOPMENT,
        "launchers": LAUNCHERS,
    },
    include_package_data=False,  # the sources of the extension are not for a wheel
    zip_safe=False,
)
