"""The launcher: start all processes of a job, and end them together.

The launcher's package knows nothing of arrays or messages. It does not import NumPy, and of
``pslite`` only small modules, so that it starts fast. Everything runs on the main thread. Read
``cli.py`` next, then:

- ``options.py``: the command line
- ``plan.py``: the processes of a job, with their environments
- ``launch/job/checks.py``: the checks before a job starts
- ``launch/job/lifecycle.py``: the rules by which a job ends
- ``launch/job/places.py``: where processes run
- ``launch/job/supervisor.py``: the main loop
- ``launch/job/guardian.py``: cleans up when the launcher itself is killed
- ``launch/backends/``: jobs on other machines; begin with ``launch/backends/ssh.py``
- ``launch/agents/agent.py``: the agent on another machine

``launch/run/`` is not part of the launcher: with it, ``kvstore.run`` starts the launcher. The
launcher's side of this is ``launch/job/signals.py``.
"""

from __future__ import annotations
