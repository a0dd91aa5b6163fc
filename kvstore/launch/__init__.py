"""The launcher: start all processes of a job, and end them together.

It knows nothing of arrays or messages and imports neither NumPy nor, but for its version,
``pslite`` itself, so that it starts fast. Everything runs on the main thread. Read ``cli.py``
next, then ``options.py`` (the command line), ``plan.py`` (who is started with which
environment), ``launch/job/checks.py`` (what is checked before), ``launch/job/lifecycle.py`` (the
rules by which a job ends), ``launch/job/places.py`` (where processes run) and
``launch/job/supervisor.py`` (the loop); ``launch/job/guardian.py`` is what remains when the
launcher itself is killed. ``launch/backends/ssh.py`` and ``launch/backends/kubernetes/run.py`` are
for jobs on other machines, which ``launch/agents/agent.py`` and
``launch/backends/kubernetes/follow.py`` serve.

``launch/run/`` is not part of it: it is how ``kvstore.run`` uses the launcher, and
``launch/job/signals.py`` is what the launcher knows of that.
"""

from __future__ import annotations
