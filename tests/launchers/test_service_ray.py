"""The cluster of the ray launcher's tests does what it is there for, before it uses it."""

from __future__ import annotations

import socket

from services.ray import Ray

PLACES = """
import ray
import socket
ray.init(log_to_driver=False)

@ray.remote(num_cpus=5)
class Place:
    def name(self):
        return socket.gethostname()

places = [Place.remote() for _ in range(2)]
print(*sorted(ray.get([place.name.remote() for place in places], timeout=60)))
"""


def test_two_actors_that_fill_a_node_each_run_on_both_nodes(ray_cluster: Ray) -> None:
    said = ray_cluster.run_python(PLACES)

    assert said.split() == sorted([socket.gethostname(), "kv-ray2"])
