"""``--server-import``: optimizers of a user's own on servers, and what is said if that fails.

Servers never run code that a worker sends. What they lack is told at the worker that asks for
it, at once, with the server's name and what to do.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job import Job, MakeJob, needs_proc

from kvstore.launch.cli import main

pytestmark = [pytest.mark.process, needs_proc]

MODULE = """
import dataclasses
import numpy as np
import kvstore

@kvstore.optimizer.register
@dataclasses.dataclass(frozen=True)
class Halving(kvstore.optimizer.Optimizer):
    learning_rate: float = 0.5
    def update(self, weight, grad, state, count, scratch):
        np.multiply(grad, self.rate(count), out=grad)
        np.subtract(weight, grad, out=weight, dtype=grad.dtype)

@kvstore.register_command(9)
def where(body):
    return f"{body} of Halving"
"""

TRAIN = """
sys.path.insert(0, os.getcwd())
import {module}
kv = mx.kvstore.create("dist_sync")
kv.set_optimizer(mx.optimizer.create("halving"))
kv.init("w", vector(*[16.0] * 2000))
for _ in range(2):
    kv.push("w", vector(*[2.0] * 2000))
    values = kv.pull("w")
print(set(values.tolist()), kv.current_optimizer(), kv.send_command_to_servers(9, "a server"))
"""

REFUSED = """
import types
sys.path.insert(0, os.getcwd())
exec(open("halving_source.py").read(), sys.modules[__name__].__dict__)
kv = mx.kvstore.create("dist_sync")
began = time.monotonic()
try:
    kv.set_optimizer(mx.optimizer.create("halving"))
except PSError as error:
    print(f"{type(error).__name__} within 2 s: {time.monotonic() - began < 2.0}")
    print(error)
try:
    kv.current_optimizer()
except PSError as error:
    print(f"then {type(error).__name__}")
kv.barrier()
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
kv.init("w", vector(4))
kv.push("w", vector(1))
print("then", kv.pull("w").tolist())
"""


REFUSAL = r"server [01] \(pid [0-9]+ on .*\): no optimizer is named 'halving'"


def with_source(job: Job, name: str, source: str = MODULE) -> Job:
    (job.directory / name).write_text(source)
    return job


@pytest.mark.parametrize(
    "named",
    [
        "halving_rule",
        pytest.param("halving_rule.py", marks=pytest.mark.slow(reason="a module runs always")),
    ],
)
def test_a_custom_optimizer_works_on_all_servers(make_job: MakeJob, named: str) -> None:
    job = with_source(make_job(2, 2, PS_CHUNK_BYTES="4096"), "halving_rule.py")
    launcher = job.launch(TRAIN.format(module="halving_rule"), "--server-import", named)
    assert launcher.wait() == 0, launcher.text
    lines = [line for line in launcher.lines if "of Halving" in line]
    assert len(lines) == 2, launcher.text
    for line in lines:
        assert "{12.0} Halving(learning_rate=0.5) ['a server of Halving', 'a server of" in line


def refusal(job: Job, server_import: str = "") -> str:
    """What both workers print of it, once they have gone on with another optimizer.

    Started by hand: the launcher does not start servers that cannot import what they should.
    """
    with_source(job, "halving_source.py")
    settings = {"KVSTORE_SERVER_IMPORT": server_import}
    for rank in range(job.num_servers):
        job.server(rank, settings)
    job.scheduler(settings)
    workers = job.workers(REFUSED)
    assert set(job.wait_all()) == {0}, job.output()
    text = "\n".join(worker.text for worker in workers)
    assert text.count("UnknownOptimizerError within 2 s: True") == 2, text
    assert text.count("then OptimizerNotSet") == 2, text
    assert text.count("then [3.0]") == 2, text
    return text


def test_an_optimizer_that_servers_do_not_know_is_an_error_that_says_what_to_do(
    make_job: MakeJob,
) -> None:
    text = refusal(make_job(2, 2))
    assert len(re.findall(REFUSAL, text)) == 2
    assert "--server-import MODULE" in text


def test_a_module_that_does_not_exist_is_named_at_the_worker(make_job: MakeJob) -> None:
    text = refusal(make_job(2, 2), "there.is_no_such_module")
    assert len(re.findall(REFUSAL, text)) == 2
    assert (
        "importing there.is_no_such_module (--server-import or KVSTORE_SERVER_IMPORT) failed"
        in text
    )
    assert "ModuleNotFoundError: No module named 'there'" in text


def test_what_a_module_raises_is_shown_at_the_worker(make_job: MakeJob) -> None:
    job = with_source(make_job(2, 1), "broken.py", MODULE.replace("import kvstore", "1 / 0"))
    text = refusal(job, "broken.py")
    assert "importing broken.py (--server-import or KVSTORE_SERVER_IMPORT) failed" in text
    assert "ZeroDivisionError: division by zero" in text


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("rules", "", "ModuleNotFoundError: No module named 'rules'"),
        ("rule.py", "print('noise')\n1 / 0", "ZeroDivisionError: division by zero"),
        ("rule", "import sys; sys.exit()", "SystemExit"),
        ("there.py", "", "FileNotFoundError: [Errno 2] No such file or directory: "),
    ],
)
def test_the_launcher_starts_nothing_when_a_module_for_servers_cannot_be_imported(
    make_job: MakeJob, name: str, source: str, sentence: str
) -> None:
    job = with_source(make_job(2, 2), "rule.py", source)
    launcher = job.launch("print('started')\n", "--server-import", name)
    assert launcher.wait() == 2, launcher.text
    (line,) = launcher.lines
    assert line.startswith(f"[launcher] importing {name} (--server-import) failed: {sentence}")
    assert line.endswith("; nothing was started")
    assert list(job.directory.glob("kvstore-launch-*")) == []


def test_the_variable_is_named_when_it_is_what_names_the_module(make_job: MakeJob) -> None:
    job = make_job(1, 1, KVSTORE_SERVER_IMPORT="rules")
    launcher = job.launch("print('started')\n")
    assert launcher.wait() == 2, launcher.text
    assert launcher.lines == [
        "[launcher] importing rules (KVSTORE_SERVER_IMPORT) failed: ModuleNotFoundError: No module "
        "named 'rules'; nothing was started"
    ]


def test_a_module_for_servers_that_kills_its_process_is_a_sentence_too(make_job: MakeJob) -> None:
    job = with_source(make_job(1, 1), "rule.py", "import os; os.kill(os.getpid(), 9)")
    launcher = job.launch("", "--server-import", "rule")
    assert launcher.wait() == 2
    assert launcher.lines == [
        "[launcher] importing rule (--server-import) failed: signal SIGKILL; nothing was started"
    ]


def test_modules_are_looked_for_where_the_servers_will_look(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (job.directory / "only servers").mkdir()
    with_source(job, "only servers/rule.py", "print('imported')")
    path = f"PYTHONPATH:{job.directory}/only servers"
    launcher = job.launch(
        'mx.kvstore.create("dist_sync")\n',
        *("--env-server", path, "--server-import", "rule"),
    )
    assert launcher.wait() == 0, launcher.text
    assert "[server 0] imported" in launcher.lines


def test_if_one_server_lacks_it_none_uses_it(make_job: MakeJob) -> None:
    job = with_source(make_job(1, 2), "halving_rule.py")
    with_source(job, "halving_source.py")
    job.scheduler()
    job.server(0, {"KVSTORE_SERVER_IMPORT": "halving_rule"})
    job.server(1)
    worker = job.worker(0, REFUSED)
    assert set(job.wait_all()) == {0}, job.output()
    assert re.search(REFUSAL, worker.text), worker.text
    assert "server 0" not in worker.text
    assert "then OptimizerNotSet" in worker.text
    assert "then [3.5]" in worker.text


@pytest.mark.parametrize("own", [[], ["--check"], ["--dry-run"]])
def test_no_host_is_asked_when_servers_could_not_import_what_they_shall(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: list[str],
) -> None:
    (tmp_path / "hosts").write_text("one\n")
    monkeypatch.setattr("kvstore.launch.backends.ssh.SshPlace", None)
    ssh = ["-n", "1", "-H", str(tmp_path / "hosts"), "--server-import", "no_such_module"]
    assert main([*ssh, *own, "true"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("[launcher] importing no_such_module (--server-import) failed: ")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_what_the_hosts_are_to_import_need_not_be_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("one\n")
    monkeypatch.setenv("KVSTORE_SERVER_IMPORT", "only_on_the_hosts")
    assert main(["-n", "1", "-H", str(tmp_path / "hosts"), "--dry-run", "true"]) == 0
    assert "# server 0 on one" in capsys.readouterr().out
    assert main(["-n", "1", "--dry-run", "true"]) == 2
