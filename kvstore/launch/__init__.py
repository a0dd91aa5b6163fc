"""The launcher: starts one scheduler, the servers and the workers of a job, and ends them all.

It knows nothing of arrays or messages and imports neither NumPy nor, but for its version,
``pslite`` itself, so that it starts fast. Everything runs on the main thread. Read ``cli.py``
next, then ``options.py`` (the command line), ``plan.py`` (who is started with which
environment), ``preflight.py`` (what is checked before), ``lifecycle.py`` (the rules by which a
job ends), ``places.py`` (where processes run) and ``supervisor.py`` (the loop); ``guardian.py``
is what remains when the launcher itself is killed. ``ssh.py`` and ``kubernetes.py`` are for jobs
on other machines, which ``agent.py`` and ``kube_follow.py`` serve.

``background.py``, ``markers.py``, ``parcels.py`` and ``worker_main.py`` are not part of it:
they are how ``kvstore.run`` uses the launcher, and ``tie.py`` is what it knows of that.
"""

from __future__ import annotations
