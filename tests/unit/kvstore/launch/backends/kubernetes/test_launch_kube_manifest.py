"""What a job is to Kubernetes, as data: roles, ranks, variables, resources, the key."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.launch.backends.kubernetes.manifest import (
    KubeJob,
    escaped,
    kube_job,
    manifests,
    plan_pods,
)
from kvstore.launch.options import LaunchError, LaunchOptions, parse_arguments

JOB = KubeJob("0123456789abcdef", "train-01234567", "the-key-of-the-job")


def options(*words: str, command: tuple[str, ...] = ("python", "train.py")) -> LaunchOptions:
    start = ("--launcher", "kubernetes", "-n", "3", "-s", "2", "--image", "lab/train:1")
    return parse_arguments([*start, *words, "--", *command])


def made(*words: str, environ: dict[str, str] | None = None, **more: Any) -> list[dict[str, Any]]:
    return manifests(options(*words, **more), JOB, environ or {})


def job_of(role: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = [each for each in found if each["metadata"]["name"] == f"train-01234567-{role}"
              and each["kind"] == "Job"]  # fmt: skip
    return job


def pod_of(role: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = job_of(role, found)["spec"]["template"]["spec"]
    return pod


def container_of(role: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(role, found)["containers"]
    return dict(container)


def variables_of(role: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    listed = container_of(role, found)["env"]
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in listed}
    assert len(variables) == len(listed)
    return variables


def test_a_job_is_a_secret_two_services_and_an_indexed_job_for_each_role() -> None:
    found = made()
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [
        ("Secret", "train-01234567-key"),
        ("Service", "train-01234567-scheduler"),
        ("Service", "train-01234567-worker"),
        ("Job", "train-01234567-scheduler"),
        ("Job", "train-01234567-server"),
        ("Job", "train-01234567-worker"),
    ]
    specs = {role: job_of(role, found)["spec"] for role in ("scheduler", "server", "worker")}
    assert {role: (spec["completions"], spec["parallelism"]) for role, spec in specs.items()} == {
        "scheduler": (1, 1),
        "server": (2, 2),
        "worker": (3, 3),
    }
    assert {spec["completionMode"] for spec in specs.values()} == {"Indexed"}


def test_everything_carries_the_label_of_the_job() -> None:
    found = made()
    labels = [each["metadata"]["labels"]["kvstore-job"] for each in found]
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in found[3:]]
    assert {*labels, *(each["kvstore-job"] for each in pods)} == {"0123456789abcdef"}
    assert JOB.selector == "kvstore-job=0123456789abcdef"


def test_nothing_is_started_twice() -> None:
    for role in ("scheduler", "server", "worker"):
        assert job_of(role, made())["spec"]["backoffLimit"] == 0
        assert pod_of(role, made())["restartPolicy"] == "Never"


def test_a_pod_learns_its_rank_and_address_from_kubernetes() -> None:
    variables = variables_of("worker", made())
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables["DMLC_TASK_ID"] == {"fieldRef": {"fieldPath": index}}
    assert variables["DMLC_NODE_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables["RANK"] == variables["GROUP_RANK"] == variables["DMLC_TASK_ID"]


def test_a_worker_finds_the_store_of_torch_at_the_name_of_the_first_pod() -> None:
    """A pod of an Indexed Job is named by its index, in the Service that is its subdomain."""
    found = made()
    variables = variables_of("worker", found)
    assert variables["MASTER_ADDR"] == "train-01234567-worker-0.train-01234567-worker"
    assert (variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("3", "0")
    service = found[2]["spec"]
    assert pod_of("worker", found)["subdomain"] == found[2]["metadata"]["name"]
    assert service["selector"] == {"kvstore-job": JOB.job_id, "kvstore-role": "worker"}
    assert service["publishNotReadyAddresses"]
    assert variables["MASTER_PORT"] == str(service["ports"][0]["port"])
    assert not {"RANK", "MASTER_ADDR"} & variables_of("server", found).keys()


def test_workers_find_the_scheduler_by_its_service_and_it_listens_at_its_own_address() -> None:
    found = made()
    assert variables_of("worker", found)["DMLC_PS_ROOT_URI"] == "train-01234567-scheduler"
    assert variables_of("server", found)["DMLC_PS_ROOT_URI"] == "train-01234567-scheduler"
    own = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables_of("scheduler", found)["DMLC_PS_ROOT_URI"] == own
    service = found[1]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == {"kvstore-job": JOB.job_id, "kvstore-role": "scheduler"}
    (port,) = service["ports"]
    assert variables_of("worker", found)["DMLC_PS_ROOT_PORT"] == str(port["port"])


def test_every_role_is_told_the_job() -> None:
    for role in ("scheduler", "server", "worker"):
        variables = variables_of(role, made())
        assert variables["DMLC_ROLE"] == role
        assert variables["DMLC_NUM_WORKER"] == "3"
        assert variables["DMLC_NUM_SERVER"] == "2"
        assert variables["PS_JOB_ID"] == "0123456789abcdef"


def test_between_pods_the_mechanism_is_the_default_one_that_encrypts() -> None:
    for role in ("scheduler", "server", "worker"):
        assert "PS_SECURITY" not in variables_of(role, made())


def test_the_key_is_in_the_secret_and_nowhere_else() -> None:
    secret, *others = made()
    assert secret["stringData"] == {"job.key": "the-key-of-the-job"}
    assert "the-key-of-the-job" not in repr(others)


def test_the_key_becomes_a_file_that_only_its_user_can_read() -> None:
    """Group bits that ``fsGroup`` adds would have every node refuse it (docs/security.md)."""
    pod = pod_of("worker", made())
    (copy,) = pod["initContainers"]
    assert copy["command"][:2] == ["sh", "-c"]
    assert copy["command"][2].startswith("umask 0277 && cat /run/kvstore/secret/job.key >")
    secret = next(volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    assert secret == {"secretName": "train-01234567-key", "defaultMode": 0o400}
    assert variables_of("worker", made())["PS_JOB_KEY_FILE"] == "/run/kvstore/key/job.key"


def test_the_command_arrives_untouched() -> None:
    command = ("python", "a $(HOME)", "$$", "$X", "b\nc", "-n", "--image", "")
    args = container_of("worker", made(command=command))["args"]
    assert args == ["python", "a $$(HOME)", "$$$$", "$$X", "b\nc", "-n", "--image", ""]
    assert "command" not in container_of("worker", made(command=command))


@pytest.mark.parametrize("text", ["$", "$$", "$(X)", "$$(X)", "a$b", "$($(X))", "no", "$ $( )"])
def test_kubernetes_turns_what_is_escaped_into_what_it_was(text: str) -> None:
    """By the rules of the API reference: ``$$`` is ``$``, ``$(NAME)`` is the value of NAME."""
    shown, rest = "", escaped(text)
    while rest:
        assert not rest.startswith("$(")
        taken = "$$" if rest.startswith("$$") else rest[0]
        shown += "$" if taken == "$$" else taken
        rest = rest[len(taken) :]
    assert shown == text


def test_values_of_variables_are_escaped_too() -> None:
    assert variables_of("worker", made("--env", "A=$(B)"))["A"] == "$$(B)"


def test_servers_run_this_package_with_one_thread_for_each_operation() -> None:
    found = made("--python", "/opt/python", "--server-import", "optimizers")
    service = ["/opt/python", "-m", "kvstore.launch.service"]
    assert container_of("server", found)["args"] == service
    assert container_of("scheduler", found)["args"] == service
    assert variables_of("scheduler", found)["PS_JOINED_FD"] == "1"
    assert "PS_JOINED_FD" not in variables_of("server", found)
    assert variables_of("server", found)["KVSTORE_SERVER_IMPORT"] == "optimizers"
    assert variables_of("server", found)["OMP_NUM_THREADS"] == "1"
    assert "KVSTORE_SERVER_IMPORT" not in variables_of("worker", found)


def test_variables_of_one_role_are_for_it_alone() -> None:
    found = made("--env", "A=all", "--env-server", "A:server", "--env-worker", "B:worker")
    assert variables_of("server", found)["A"] == "server"
    assert variables_of("worker", found)["A"] == "all"
    assert variables_of("worker", found)["B"] == "worker"
    assert "B" not in variables_of("scheduler", found)


def test_a_name_without_a_value_takes_the_value_from_here() -> None:
    assert variables_of("worker", made("--env", "A", environ={"A": "here"}))["A"] == "here"


def test_a_setting_that_no_pod_could_read_is_refused() -> None:
    with pytest.raises(LaunchError, match="PS_VERBOSE is 'x'; expected a whole number "):
        made("--env-server", "PS_VERBOSE:x")


def test_exported_settings_travel_and_those_of_this_machine_do_not() -> None:
    environ = {
        "PS_VERBOSE": "1",
        "KVSTORE_PLACEMENT": "equal",
        "MXNET_KVSTORE_USETREE": "1",
        "PS_MACHINE": "laptop",
        "PS_JOB_KEY_FILE": "/home/me/job.key",
        "DMLC_INTERFACE": "eth0",
        "PATH": "/bin",
    }
    variables = variables_of("worker", made(environ=environ))
    assert variables["PS_VERBOSE"] == "1"
    assert variables["KVSTORE_PLACEMENT"] == "equal"
    assert variables["MXNET_KVSTORE_USETREE"] == "1"
    assert variables["PS_JOB_KEY_FILE"] == "/run/kvstore/key/job.key"
    assert not {"PS_MACHINE", "DMLC_INTERFACE", "PATH"} & variables.keys()


def test_settings_of_a_job_around_this_one_stay_there() -> None:
    environ = {"PS_JOB_ID": "other", "DMLC_TASK_ID": "0", "PS_SECURITY": "plain"}
    assert "PS_SECURITY" not in variables_of("worker", made(environ=environ))


def test_a_wish_for_an_interface_replaces_the_address_of_the_pod() -> None:
    variables = variables_of("worker", made("--env", "DMLC_INTERFACE=net1"))
    assert variables["DMLC_INTERFACE"] == "net1"
    assert "DMLC_NODE_HOST" not in variables


def test_a_key_file_of_the_pods_own_is_refused() -> None:
    with pytest.raises(LaunchError, match="PS_JOB_KEY_FILE cannot be set for pods"):
        made("--env", "PS_JOB_KEY_FILE=/key")


def test_pods_wait_for_each_other_for_as_long_as_images_may_take() -> None:
    assert variables_of("worker", made())["PS_RENDEZVOUS_TIMEOUT"] == "600"
    found = made("--env", "PS_RENDEZVOUS_TIMEOUT=30")
    assert variables_of("worker", found)["PS_RENDEZVOUS_TIMEOUT"] == "30"


def test_resources_are_those_of_each_role() -> None:
    found = made("--worker-cores", "4", "--worker-memory", "8g", "--worker-gpus", "2",
                 "--server-memory", "512m")  # fmt: skip
    assert container_of("worker", found)["resources"] == {
        "requests": {"cpu": "4", "memory": "8192Mi"},
        "limits": {"memory": "8192Mi", "nvidia.com/gpu": "2"},
    }
    assert container_of("server", found)["resources"] == {
        "requests": {"memory": "512Mi"},
        "limits": {"memory": "512Mi"},
    }
    assert variables_of("worker", found)["OMP_NUM_THREADS"] == "4"


def test_the_container_that_copies_the_key_asks_for_no_gpu() -> None:
    (copy,) = pod_of("worker", made("--worker-gpus", "1"))["initContainers"]
    assert copy["resources"] == {}


def test_pods_run_as_a_user_without_privileges() -> None:
    pod = pod_of("worker", made())
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert pod["automountServiceAccountToken"] is False


def test_shared_memory_is_as_large_as_the_memory() -> None:
    pod = pod_of("worker", made())
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    mount = {"name": "shared-memory", "mountPath": "/dev/shm"}
    assert mount in container_of("worker", made())["volumeMounts"]


def test_an_image_is_needed() -> None:
    bare = parse_arguments(["--launcher", "kubernetes", "-n", "1", "python", "train.py"])
    with pytest.raises(LaunchError, match="needs --image IMAGE") as caught:
        manifests(bare, JOB, {})
    assert caught.value.exit_code == 2


def test_a_job_is_named_by_the_user_and_by_its_id() -> None:
    job = kube_job(options("--jobname", "lenet"), "abcdef0123456789", "key", "team")
    assert job.name == "lenet-abcdef01"
    assert all(each["metadata"]["namespace"] == "team" for each in manifests(options(), job, {}))


@pytest.mark.parametrize("name", ["LeNet", "1x", "x-", "a_b", "x" * 37])
def test_a_name_that_kubernetes_would_refuse_is_refused_at_once(name: str) -> None:
    with pytest.raises(LaunchError, match="--jobname"):
        kube_job(options("--jobname", name), "0" * 16, "", None)


def test_a_namespace_that_kubernetes_would_refuse_is_refused_at_once() -> None:
    with pytest.raises(LaunchError, match=r"--namespace must have .*got 'A B'"):
        kube_job(options(), "0" * 16, "", "A B")


def test_all_names_of_hosts_stay_within_63_characters() -> None:
    job = kube_job(options("--jobname", "x" * 36), "0" * 16, "", None)
    assert len(f"{job.job_name('scheduler')}-99999") <= 63


def test_a_later_source_of_a_variable_wins() -> None:
    wanted = options("--env", "PS_VERBOSE=2", "--env-worker", "PS_VERBOSE:0")
    specs = plan_pods(wanted, JOB, {"PS_VERBOSE": "1"})
    found = {spec.role: spec.environment["PS_VERBOSE"] for spec in specs}
    assert found == {"scheduler": "2", "server": "2", "worker": "0"}
