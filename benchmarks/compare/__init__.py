"""The parts of ``benchmarks/peers.py``, which compares this package with other systems.

``rows.py`` says what is compared and what is asked, ``contenders.py`` who takes part and with
which settings, ``jobs.py`` starts processes. These run ``run_stores.py``, ``run_kv.py``,
``run_mxnet.py``, ``run_allreduce.py`` or ``run_floors.py``, which share the timed loop of
``loop.py`` and the check of ``arithmetic.py``. ``figures.py`` makes numbers of what they
report, ``table.py`` and ``plot.py`` show them.
"""
