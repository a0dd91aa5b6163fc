"""A stand-in for ``yarn`` and ``hadoop`` and the cluster behind them, on this machine alone.

Behaves, for the calls that the launcher makes, as Hadoop's documentation and sources say
(``Client.java`` and ``ApplicationMaster.java`` of the distributed shell, ``YarnClientImpl.java``,
``ApplicationCLI.java``, ``ContainerLaunch.java``): ``yarn jar``, ``yarn application -kill``,
``yarn classpath`` and ``hadoop fs -mkdir`` and ``-rm``. The state is the directory $YARN_STANDIN
with HDFS in it; ``faults.json`` there says what is special. The resource manager and the
application master are the process ``--master``, one for each application, which goes on when
the client is killed. A container is a process with a directory and an environment of its own, and
no other isolation. Called as ``yarn.py PROGRAM ARGUMENT ...``. Standard library only; nothing of
this project.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

STATE = Path(os.environ["YARN_STANDIN"])
USER = "ada"
HOME = STATE / "hdfs" / "user" / USER
UMASK = 0o022  # fs.permissions.umask-mode, where nothing else is said
CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
MONITOR_S = 1.0
HEARTBEAT_S = 0.1  # 1 s in a real cluster
SIGKILL_AFTER_S = 0.25  # yarn.nodemanager.sleep-delay-before-sigkill.ms
LONGEST_S = 150.0
FINAL = ("FINISHED", "FAILED", "KILLED")

# Of the client, without what it has for the timeline and for placement.
_WITH_VALUE = """
appname priority queue timeout master_memory master_vcores master_resources jar shell_command
shell_script shell_args shell_env shell_cmd_priority container_type container_memory
container_vcores container_resources container_resource_profile num_containers log_properties
attempt_failures_validity_interval node_label_expression container_retry_policy
container_retry_error_codes container_max_retries container_retry_interval application_tags
localize_files
"""
WITH_VALUE = frozenset(_WITH_VALUE.split())
OPTIONS = WITH_VALUE | {
    "keep_containers_across_application_attempts",
    "debug",
    "help",
    "create",
}
MANY_VALUES = ("shell_args",)


def faults() -> dict[str, Any]:
    path = STATE / "faults.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(text)
    draft.rename(path)


def log(level: str, source: str, text: str) -> None:
    """As log4j's console appender does by Hadoop's log4j.properties; on standard error."""
    wanted = os.environ.get("HADOOP_ROOT_LOGGER", "INFO,console").partition(",")[0]
    if wanted == "INFO" or level != "INFO":
        moment = datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:23]
        print(f"{moment} {level} {source}: {text}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    log("INFO", "distributedshell.Client", text)


# -- an application's state -------------------------------------------------------------------


def application_path(application: str) -> Path:
    return STATE / "applications" / f"{application}.json"


def load(application: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(application_path(application).read_text())
    return found


def save(one: dict[str, Any], **changed: Any) -> None:
    one.update(changed)
    write(application_path(one["id"]), json.dumps(one))


# -- hadoop fs --------------------------------------------------------------------------------


def in_hdfs(name: str) -> Path:
    return STATE / "hdfs" / name.lstrip("/") if name.startswith("/") else HOME / name


def file_system(words: list[str]) -> int:
    umask = UMASK
    while words[:1] == ["-D"]:
        name, _, value = words[1].partition("=")
        if name == "fs.permissions.umask-mode":
            umask = int(value, 8)
        words = words[2:]
    command, rest = words[0], words[1:]
    options = [word for word in rest if word.startswith("-")]
    paths = [word for word in rest if not word.startswith("-")]
    if faults().get("no_file_system"):
        print(f"{command[1:]}: Call From here to nn:8020 failed on connection exception: "
              "java.net.ConnectException: Connection refused", file=sys.stderr)  # fmt: skip
        return 1
    if command == "-mkdir" and set(options) <= {"-p"}:
        for path in map(in_hdfs, paths):
            os.umask(umask)
            path.mkdir(parents="-p" in options, exist_ok="-p" in options)
        return 0
    if command == "-rm" and set(options) <= {"-r", "-f", "-skipTrash"}:
        for path in map(in_hdfs, paths):
            if path.exists():
                shutil.rmtree(path)
                print(f"Deleted {path}")
        return 0
    print(f"{command[1:]}: Unknown command", file=sys.stderr)
    return 255


def upload(source: Path, target: Path) -> None:
    """As FileSystem.copyFromLocalFile: with the umask's rights, whatever those of ``source``."""
    os.umask(UMASK)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


# -- yarn jar: the client ---------------------------------------------------------------------


class Unparsable(Exception):
    """What commons-cli throws; the text is that of its exception."""


def parse(words: Sequence[str]) -> dict[str, list[str]]:
    """As GnuParser: one or two dashes; words that belong to no option are left aside."""
    found: dict[str, list[str]] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-":
            continue
        name, is_assigned, value = word.lstrip("-").partition("=")
        if name not in OPTIONS:
            raise Unparsable(f"UnrecognizedOptionException: Unrecognized option: {word}")
        values = [value] if is_assigned else []
        most = 0 if name not in WITH_VALUE else 10**6 if name in MANY_VALUES else 1
        while position < len(words) and len(values) < most:
            following = words[position]
            if following.startswith("-") and following.lstrip("-").split("=")[0] in OPTIONS:
                break
            values.append(following)
            position += 1
        if name in WITH_VALUE and not values:
            raise Unparsable(f"MissingArgumentException: Missing argument for option: {name}")
        found.setdefault(name, []).extend(values)
    return found


def check(options: dict[str, list[str]]) -> None:
    """As Client.init. Raises ValueError."""
    if "jar" not in options:
        raise ValueError("No jar file specified for application master")
    if "shell_script" not in options:
        raise ValueError(
            "No shell command or shell script specified to be executed by application master"
        )
    for name in ("container_memory", "container_vcores", "num_containers", "timeout"):
        value = int(options.get(name, ["1"])[0])
        if not 0 < value < 2**31:
            raise ValueError(f'For input string: "{value}"')


def client(words: list[str]) -> int:
    jar, *rest = words
    if not Path(jar).is_file():
        print(f"JAR does not exist or is not a normal file: {jar}", file=sys.stderr)
        return 255
    say("Initializing Client")
    try:
        options = parse([word for word in rest if word != CLIENT])
        check(options)
    except Unparsable as error:
        log("ERROR", "distributedshell.Client", "Error running Client")
        print(f"org.apache.commons.cli.{error}", file=sys.stderr)
        print("\tat org.apache.commons.cli.Parser.processOption(Parser.java:363)", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        print("usage: Client", file=sys.stderr)
        return 255
    say("Running Client")
    while faults().get("unreachable"):
        log("INFO", "ipc.Client", "Retrying connect to server: rm/10.0.0.1:8032. Already tried 3 "
            "time(s); retry policy is RetryUpToMaximumCountWithFixedSleep(maxRetries=10, "
            "sleepTime=1000 MILLISECONDS)")  # fmt: skip
        time.sleep(MONITOR_S)
    log("WARN", "util.NativeCodeLoader", "Unable to load native-hadoop library for your platform")
    return monitor(submit(options), int(options.get("timeout", ["600000"])[0]) / 1000)


def submit(options: dict[str, list[str]]) -> str:
    """The application's id."""
    queue = options.get("queue", ["default"])[0]
    if queue in faults().get("unknown_queues", ()):
        log("ERROR", "distributedshell.Client", "Error running Client")
        print(f"org.apache.hadoop.yarn.exceptions.YarnException: Failed to submit application to "
              f"YARN : root.{queue} is not a leaf queue", file=sys.stderr)  # fmt: skip
        sys.exit(1)
    (STATE / "applications").mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        application = f"application_{STATE.stat().st_ino}_{number:04}"
        try:
            (STATE / "applications" / application).mkdir()
            break
        except FileExistsError:
            number += 1
    name = options.get("appname", ["DistributedShell"])[0]
    upload(Path(options["jar"][0]), HOME / name / application / "AppMaster.jar")
    script = HOME / name / application / "ExecScript"
    upload(Path(options["shell_script"][0]), script)
    say("Setting up app master command")
    say("Submitting application to ASM")
    one = {
        "id": application,
        "name": name,
        "queue": queue,
        "options": options,
        "script": str(script),
        "state": "ACCEPTED",
        "final": "UNDEFINED",
        "diagnostics": "[Sun Nov 22 08:00:00 +0000 2026] Application is added to the scheduler and "
        "is not yet activated. Queue's AM resource limit exceeded.  Details : AM Partition = "
        "<DEFAULT_PARTITION>; AM Resource Request = <memory:128, vCores:1>; ",
    }
    save(one)
    clean = {"PATH": os.environ["PATH"], "YARN_STANDIN": str(STATE)}
    null = subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, __file__, "--master", application],
        env=clean, stdin=null, stdout=null, stderr=null, cwd="/", start_new_session=True,
    )  # fmt: skip
    time.sleep(faults().get("submitting_s", 0.2))
    log("INFO", "impl.YarnClientImpl", f"Submitted application {application}")
    return application


def monitor(application: str, timeout_s: float) -> int:
    until_s = time.monotonic() + timeout_s
    while True:
        time.sleep(MONITOR_S)
        one = load(application)
        say(
            f"Got application report from ASM for, appId={int(application.rpartition('_')[2])}, "
            f"clientToAMToken=null, appDiagnostics={one['diagnostics']}, appMasterHost=here, "
            f"appQueue={one['queue']}, appMasterRpcPort=-1, appStartTime=1, "
            f"yarnAppState={one['state']}, distributedFinalState={one['final']}, "
            f"appTrackingUrl=http://rm:8088/proxy/{application}/, appUser={USER}"
        )
        if one["state"] == "FINISHED" and one["final"] == "SUCCEEDED":
            say("Application has completed successfully. Breaking monitoring loop")
            say("Application completed successfully")
            return 0
        if one["state"] in FINAL:
            say(
                f"Application did not finish. YarnState={one['state']}, "
                f"DSFinalStatus={one['final']}. Breaking monitoring loop"
            )
            log("ERROR", "distributedshell.Client", "Application failed to complete successfully")
            return 2
        if time.monotonic() > until_s:
            say("Reached client specified timeout for application. Killing application")
            kill(application)
            return 2


def kill(application: str) -> int:
    if not application_path(application).exists():
        print(f"Application with id '{application}' doesn't exist in RM.")
        return 1
    if load(application)["state"] in FINAL:
        print(f"Application {application} has already finished ")
        return 0
    print(f"Killing application {application}")
    (STATE / "applications" / application / "kill").touch()
    until_s = time.monotonic() + 20
    while load(application)["state"] not in FINAL and time.monotonic() < until_s:
        time.sleep(0.05)
    log("INFO", "impl.YarnClientImpl", f"Killed application {application}")
    return 0


# -- the resource manager and the application master ------------------------------------------


class Master:
    """One application, from the queue to its end."""

    def __init__(self, application: str) -> None:
        self.one = load(application)
        options = self.one["options"]
        self.total = int(options.get("num_containers", ["1"])[0])
        self.arguments = " ".join(options.get("shell_args", []))
        self.directory = STATE / "nm" / "usercache" / USER / "appcache" / application
        self.running: list[subprocess.Popen[bytes]] = []
        self.directories: dict[int, Path] = {}
        self.codes: list[int] = []
        self.launched = 0
        self.shell_id = 1
        self.give_up_s = time.monotonic() + LONGEST_S

    def run(self) -> None:
        while faults().get("queued") and not self.is_killed:
            time.sleep(HEARTBEAT_S)
        if problem := faults().get("master_fails"):
            save(self.one, state="FAILED", final="FAILED", diagnostics=problem)
            return
        if not self.is_killed:
            save(self.one, state="RUNNING", diagnostics="")
            self._localise()
        while len(self.codes) < self.total and not self.is_killed:
            self._launch_some()
            time.sleep(HEARTBEAT_S)
            self._collect()
        self._stop_containers()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._end()

    @property
    def is_killed(self) -> bool:
        path = STATE / "applications" / self.one["id"] / "kill"
        return path.exists() or time.monotonic() > self.give_up_s

    def _localise(self) -> None:
        """The master renames the script; a node's copy can be read by its user alone."""
        self.directory.mkdir(parents=True)
        script = Path(self.one["script"])
        renamed = script.with_name("ExecScript.sh")
        script.rename(renamed)
        local = self.directory / "ExecScript.sh"
        local.write_bytes(renamed.read_bytes())
        local.chmod(0o500)

    def _launch_some(self) -> None:
        wanted = self.total + faults().get("extra", 0)
        room = faults().get("room", wanted)
        while self.launched < wanted and len(self.running) < room:
            if self.launched == 0 and self.shell_id <= faults().get("aborted", 0):
                self.shell_id += 1  # ABORTED before it ran: another one is asked for
                continue
            self._launch()

    def _launch(self) -> None:
        application = self.one["id"].removeprefix("application_")
        name = f"container_{application}_01_{self.shell_id + 1:06}"
        directory, logs = self.directory / name, STATE / "userlogs" / self.one["id"] / name
        directory.mkdir(mode=0o710)
        logs.mkdir(parents=True)
        (directory / "ExecScript.sh").symlink_to(self.directory / "ExecScript.sh")
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "USER": USER,
            "LOGNAME": USER,
            "HOME": "/home/",
            "PWD": str(directory),
            "CONTAINER_ID": name,
            "NM_HOST": os.uname().nodename,
            "LOCAL_DIRS": str(self.directory),
            "LOG_DIRS": str(logs),
            "YARN_SHELL_ID": str(self.shell_id),
        }
        if faults().get("old_hadoop"):
            del environment["YARN_SHELL_ID"]
        for given in self.one["options"].get("shell_env", []):
            key, _, value = given.partition("=")
            environment[key] = value
        command = f"bash ExecScript.sh {self.arguments} 1>{logs}/stdout 2>{logs}/stderr"
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=directory, env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.running.append(process)
        self.directories[process.pid] = directory
        self.launched += 1
        self.shell_id += 1

    def _collect(self) -> None:
        for process in [one for one in self.running if one.poll() is not None]:
            self._clean_up(process)
            self.codes.append(process.wait())

    def _clean_up(self, process: subprocess.Popen[bytes]) -> None:
        self.running.remove(process)
        signal_group(process.pid, signal.SIGKILL)
        shutil.rmtree(self.directories[process.pid], ignore_errors=True)

    def _stop_containers(self) -> None:
        for process in self.running:
            signal_group(process.pid, signal.SIGTERM)
        if self.running:
            time.sleep(SIGKILL_AFTER_S)
        for process in list(self.running):
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
            self._clean_up(process)

    def _end(self) -> None:
        failed = sum(1 for code in self.codes if code)
        if self.is_killed:
            text = f"Application {self.one['id']} was killed by user {USER} at 10.0.0.1"
            save(self.one, state="KILLED", final="KILLED", diagnostics=text)
        elif failed:
            text = (
                f"Application Failure: desired = {self.total}, completed = {len(self.codes)}, "
                f"allocated = {self.launched}, failed = {failed}, diagnostics = "
                "[2026-11-22 08:00:00.000]Exception from container-launch.\nContainer id: "
                "container_1\nExit code: 3\n\tat org.apache.hadoop.util.Shell.run(Shell.java:1)\n"
            )
            save(self.one, state="FINISHED", final="FAILED", diagnostics=text)
        else:
            save(self.one, state="FINISHED", final="SUCCEEDED", diagnostics="")


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def main(argv: list[str]) -> int:
    program, *words = argv
    if program == "--master":
        Master(words[0]).run()
        return 0
    with (STATE / "calls.log").open("a") as file:
        file.write(json.dumps(argv) + "\n")
    if program == "hadoop" and words[:1] == ["fs"]:
        return file_system(words[1:])
    if program == "yarn" and words[:1] == ["classpath"]:
        print(f"{STATE}/etc/hadoop:{STATE}/elsewhere/*")
        return 0
    if program == "yarn" and words[:1] == ["jar"]:
        return client(words[1:])
    if program == "yarn" and words[:2] == ["application", "-kill"] and len(words) == 3:
        return kill(words[2])
    found = re.sub(r"\W", " ", " ".join(words))
    print(f"Error: Could not find or load main class {found}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
