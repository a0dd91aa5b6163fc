"""Real services for the tests of the launchers, under the tests' control. Read daemon.py first.

Each is a context manager in a module of its own and a fixture (scope: session) in ../conftest.py.

``ssh_hosts`` (sshd.py, :class:`SshHosts`): two hosts, each with an address, a name and a /dev/shm.

    hosts = ssh_hosts.write_hostfile(tmp_path / "hosts")       # or with lines of your own
    launch("--launcher", "ssh", "-H", hosts, f"--launcher-args={ssh_hosts.launcher_args}", ...)

  ``addresses`` (port 22 and 2222), ``names``, ``launcher_address``, ``interface`` (for
  DMLC_INTERFACE), ``config`` (ssh -F); ``asks_password``, ``unknown_key``, ``unreachable`` and
  ``unknown_name`` for what goes wrong; ``ssh(host, *words)`` runs a command, ``processes()``
  is what still runs on the hosts.

``slurm`` (slurm.py, :class:`Slurm`): a slurmctld here and a slurmd on each of two hosts of its own.

    launch("--launcher", "slurm", ..., env={**os.environ, **slurm.environment})

  ``nodes`` are the hosts' names, with 8 processors and 2 GPUs each (that are none); ``partition``;
  ``run(*words)`` runs srun, sbatch and the like and returns what they print, ``jobs()`` and
  ``processes()`` are what still waits or runs.

``mpi`` (mpi.py, :class:`Mpi`): a test that asks for it runs twice, with Open MPI and with MPICH
(``mpi_kinds["mpich"]`` is one of them by name; scope of both: what they are never changes).

    launch("--launcher", "mpi", ..., env={**os.environ, **mpi.environment})
    launch("--launcher", "mpi", "-H", ..., env={**os.environ, **mpi.environment_for(ssh_hosts)})

  ``kind``; ``environment`` puts an mpirun of this kind first on the PATH and lets root run it;
  ``write_hostfile(path, *hosts)`` in mpirun's own way of writing it.

``gridengine`` (gridengine.py, :class:`GridEngine`): a master here, an execd on each of two hosts of
its own.

    launch("--launcher", "sge", ..., env={**os.environ, **gridengine.environment})

  ``hosts`` are their names, with 16 slots each; ``queue``; ``run(*words)`` runs qsub, qstat and the
  like, ``jobs()`` and ``processes()`` are what still waits or runs.

``ray_cluster`` (ray.py, :class:`Ray`): a head here and a second node on a host of its own.

    launch("--launcher", "ray", ..., env={**os.environ, **ray_cluster.environment})

  ``address`` (HOST:PORT, also RAY_ADDRESS in ``environment``), 8 processors and 2 GPUs (that are
  none) on each node; ``run_python(text)`` runs a driver. Drivers are processes of their own:
  ``ray.init()`` in the process of pytest would leave threads and children behind.
  ``growing_ray_cluster`` (scope: function) is a head with one processor and Ray's autoscaler,
  which adds up to two nodes of 4 processors to it.
"""
