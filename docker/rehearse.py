"""Rehearse docker/Dockerfile without a Docker engine: `make rehearse`, as root, on Linux.

Carries out the Dockerfile's own instructions in root file systems of their own, of Debian by debootstrap, and
then lives with the result as a container would: process 1, another user, no capability, no network, a root
file system that is read-only; then as the containers of compose.cluster.yaml, on a network of their own. What
is not rehearsed is the base image; Debian's Python stands in for it.
Beside Python it needs debootstrap, util-linux, iproute2, and a network for the installing.

    python3 docker/rehearse.py              # about ten minutes, and 5 GB in build/rehearsal
    python3 docker/rehearse.py --reuse      # only lives, with what was built last
    python3 docker/rehearse.py --build-arg TORCH_INDEX_URL=https://pypi.org/simple      # the CUDA variant
    python3 docker/rehearse.py --bind /etc/pip.conf --bind /srv/wheels      # what pip may see of this machine
"""

import argparse
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).resolve().parent.parent
DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
SUITE = "bookworm"
STAND_IN = "ca-certificates,python3,python3-venv,python3-pip"
"""For the base image, beside Debian itself."""
PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
APART = ("pid", "net", "ipc", "uts", "mount")
"""The namespaces of a container."""
TOKENS = {"train": 20_000, "valid": 3_000, "test": 3_000}
"""Of the sweep: some seconds an epoch."""
CLIENT = ("env", "FRATERNAL_TOKEN_FILE=/run/secrets/fraternal_admin_token", "fraternal")
PREFIX = "198.18.0"
"""Of the addresses of containers that have a network; RFC 2544: for tests."""
TRAINING = ("ray::LanguageMo", "ray::ResourceTr")
"""Names of processes that run trials, as the kernel cuts them off."""
POWERLESS = "--no-new-privs --bounding-set=-all --inh-caps=-all"
INHERITED = re.compile(r"PIP_\w+|\w+_proxy|\w+_PROXY")
"""Variables that say how this machine reaches packages."""


@dataclass(frozen=True)
class Instruction:
    keyword: str
    flags: tuple[tuple[str, str], ...]
    rest: str


@dataclass
class Image:
    """What an image says of the containers to be made of it."""

    stage: str = ""
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


class Engine(Protocol):
    def begin(self, stage: str, base: str) -> None:
        """A stage over another one, or over an image."""

    def copy(self, stage: str, sources: list[str], target: str, origin: str | None) -> None:
        """From another stage, or from the context."""

    def run(self, stage: str, command: str, image: Image, mounts: list[dict[str, str]]) -> None: ...


def parse(text: str) -> list[Instruction]:
    """A Dockerfile's instructions: comments left out, lines that go on put together."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [_instruction(line) for line in joined.splitlines() if line.strip()]


def _instruction(line: str) -> Instruction:
    keyword, _, rest = line.strip().partition(" ")
    flags = []
    while found := re.match(r"\s*--([a-z-]+)=(\S+)\s+", rest):
        flags.append((found[1], found[2]))
        rest = rest[found.end() :]
    return Instruction(keyword, tuple(flags), rest.strip())


def build(instructions: list[Instruction], engine: Engine, build_args: Mapping[str, str]) -> Image:
    """Carry them out. Raises ValueError for what no rehearsal knows, so that nothing is passed over."""
    image, shared, arguments = Image(), dict[str, str](), dict[str, str]()
    for one in instructions:
        known = {**image.env, **arguments}
        match one.keyword:
            case "ARG":
                name, _, value = one.rest.partition("=")
                (arguments if image.stage else shared)[name] = build_args.get(name, _filled(value, known))
            case "FROM":
                base, _, stage = _filled(one.rest, shared).partition(" AS ")
                image, arguments = Image(stage or "final"), {}
                engine.begin(image.stage, base)
            case "ENV":
                pairs = [pair.partition("=") for pair in shlex.split(one.rest)]
                image.env |= {name: _filled(value, {"PATH": PATH, **known}) for name, _, value in pairs}
            case "WORKDIR":
                image.workdir = one.rest
            case "USER":
                image.user = one.rest
            case "COPY":
                *sources, target = one.rest.split()
                where = os.path.join(image.workdir, target)
                engine.copy(image.stage, sources, where, dict(one.flags).get("from"))
            case "RUN":
                mounts = [dict(part.split("=") for part in value.split(",")) for _, value in one.flags]
                engine.run(image.stage, one.rest, Image(**{**vars(image), "env": known}), mounts)
            case "HEALTHCHECK":
                image.health = json.loads(one.rest.removeprefix("CMD"))
            case "ENTRYPOINT":
                image.entrypoint = json.loads(one.rest)
            case "CMD":
                image.command = json.loads(one.rest)
            case "LABEL" | "EXPOSE":
                pass
            case _:
                raise ValueError(f"{one.keyword} is not known here: teach docker/rehearse.py")
    return image


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[0]), text)


def excluded(rules: str) -> Callable[[str, list[str]], set[str]]:
    """For shutil.copytree: names below a copied folder that .dockerignore leaves out, by its `**/` lines."""
    return shutil.ignore_patterns(*(line[3:] for line in rules.splitlines() if line.startswith("**/")))


class RootFileSystems:
    """Stages as folders, each over another one; to be used in a mount namespace of one's own."""

    def __init__(self, folder: Path, mirror: str, binds: list[Path]) -> None:
        self._folder, self._mirror = folder, mirror
        self._binds = [Path("/etc/resolv.conf"), Path("/etc/hosts"), *binds]
        self._below: dict[str, list[Path]] = {}

    def root(self, stage: str) -> Path:
        return self._folder / stage / "root"

    def size(self, stage: str) -> str:
        done = subprocess.run(["du", "-sh", self._folder / stage / "upper"], capture_output=True, text=True)
        return done.stdout.split()[0]

    def begin(self, stage: str, base: str, *, anew: bool = True) -> None:
        folder = self._folder / stage
        if anew:
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        below = self._below.get(base) or [self._stand_in()]
        self._below[stage] = [folder / "upper", *below]
        lower = ":".join(map(str, below))
        layers = f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}"
        _do("mount", "-t", "overlay", "overlay", "-o", layers, self.root(stage))

    def _stand_in(self) -> Path:
        base = self._folder / "debian"
        ready = base / ".ready"
        if not ready.exists():
            shutil.rmtree(base, ignore_errors=True)
            print(f"== debootstrap {SUITE}", flush=True)
            _do("debootstrap", "--variant=minbase", f"--include={STAND_IN}", SUITE, base, self._mirror)
            for name in ("python", "pip"):  # where the image has its own
                (base / "usr/local/bin" / name).symlink_to(f"/usr/bin/{name}3")
            ready.touch()
        return base

    def copy(self, stage: str, sources: list[str], target: str, origin: str | None) -> None:
        _say(f"COPY {' '.join(sources)} {target}")
        root = REPOSITORY if origin is None else self.root(origin)
        ignored = excluded((DOCKERFILE.parent / "Dockerfile.dockerignore").read_text())
        for name in sources:
            source, there = root / name.lstrip("/"), self.root(stage) / target.lstrip("/")
            if source.is_dir():
                ignore = ignored if origin is None else None
                shutil.copytree(source, there, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                there.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, there)

    def run(self, stage: str, command: str, image: Image, mounts: list[dict[str, str]]) -> None:
        _say(f"RUN {command}")
        root = self.root(stage)
        inside = root / image.workdir.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        binds = [(path, path) for path in self._binds]
        for mount in mounts:
            if mount["type"] != "bind":
                raise ValueError(f"a mount of type {mount['type']} is not known here")
            binds.append((self.root(mount["from"]) / mount["source"].lstrip("/"), Path(mount["target"])))
        script = ["set -e", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        for there, here in binds:
            point = root / str(here).lstrip("/")
            if not point.exists():
                point.mkdir(parents=True) if there.is_dir() else _touch(point)
            script.append(f"mount --bind {there} {point}")
        script.append(f'exec chroot {root} /bin/sh -c \'cd "$0" && exec /bin/sh -ec "$1"\' "$0" "$1"')
        inherited = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
        env = {"PATH": PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **inherited, **image.env}
        shell = ["unshare", "--mount", "sh", "-c", "\n".join(script), image.workdir, command]
        done = subprocess.run(shell, env={**env, "PATH": PATH}, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise SystemExit(f"RUN {command}\nended with {done.returncode}")


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _do(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _say(line: str) -> None:
    print(f"== {line if len(line) < 150 else line[:147] + '...'}", flush=True)


# Living with it.


START = """set -e
mkdir -p "$ROOT/run/secrets"
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount -t sysfs -o ro sysfs "$ROOT/sys"
mount -t tmpfs -o noexec,nosuid,nodev,mode=1777,size=2g tmpfs "$ROOT/tmp"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$ROOT/dev"
for name in null zero full random urandom tty; do
  touch "$ROOT/dev/$name" && mount --bind "/dev/$name" "$ROOT/dev/$name"
done
ln -s /proc/self/fd "$ROOT/dev/fd"
mkdir "$ROOT/dev/shm"
mount -t tmpfs -o noexec,nosuid,nodev,mode=1777,size="$SHM" tmpfs "$ROOT/dev/shm"
if [ -n "$VOLUME" ]; then mount --bind "$VOLUME" "$ROOT/data"; fi
mount -t tmpfs -o mode=755 tmpfs "$ROOT/run/secrets"
for given in $(ls "$SECRETS"); do
  touch "$ROOT/run/secrets/$given"
  mount --bind "$SECRETS/$given" "$ROOT/run/secrets/$given"
  mount -o remount,bind,ro "$ROOT/run/secrets/$given"
done
mount --bind "$HOSTS" "$ROOT/etc/hosts"
mount -o remount,bind,ro "$ROOT/etc/hosts"
mount -o remount,bind,ro "$ROOT"
hostname "$NAME"
ip link set lo up
until [ -z "$ADDRESS" ] || ip route show default | grep -q eth0; do sleep 0.05; done
exec chroot "$ROOT" setpriv {who} env -i {env} sh -c 'cd "$0" && exec "$@"' "$@"
"""


class Network:
    """A bridge that containers are plugged into, in a namespace of its own: nothing of this machine's."""

    def __init__(self) -> None:
        self._switch = subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up; exec sleep inf"])
        self.addresses: dict[str, str] = {}
        outside = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._switch.pid}/ns/net") == outside:
            time.sleep(0.01)
        self._ip(self._switch.pid, "link add bridge type bridge")
        self._ip(self._switch.pid, f"addr add {PREFIX}.1/24 dev bridge")
        self._ip(self._switch.pid, "link set bridge up")

    def plug_in(self, name: str, process: int) -> None:
        cable = f"c{process}"
        self._ip(self._switch.pid, f"link add {cable} type veth peer name eth0 netns {process}")
        self._ip(self._switch.pid, f"link set {cable} master bridge up")
        self._ip(process, f"addr add {self.addresses[name]}/24 dev eth0")
        self._ip(process, "link set eth0 up")
        self._ip(process, f"route add default via {PREFIX}.1")

    @staticmethod
    def _ip(process: int, command: str) -> None:
        _do("nsenter", f"--target={process}", "--net", "ip", *command.split())

    def close(self) -> None:
        self._switch.kill()
        self._switch.wait()


class Container:
    """A process 1 of its own in an image's file system, as Docker would start it."""

    def __init__(
        self,
        image: Image,
        root: Path,
        volume: Path | None,
        given: Path,
        *,
        name: str = "controller",
        shm: str = "512m",
        network: Network | None = None,
    ) -> None:
        """`given` is its folder of secrets; beside it are its log and its hosts."""
        self._image, self.log = image, given.parent / f"{name}.log"
        user, group = image.user.split(":")
        self._who = f"--reuid={user} --regid={group} --clear-groups {POWERLESS}"
        self._env = " ".join(shlex.quote(f"{name}={value}") for name, value in image.env.items())
        script = START.format(who=self._who, env=self._env)
        apart = ["unshare", "--fork", "--kill-child", *(f"--{name}" for name in APART)]
        others = network.addresses if network is not None else {}
        hosts = given.parent / f"{name}.hosts"
        lines = {"localhost": "127.0.0.1", **others}
        hosts.write_text("".join(f"{address} {host}\n" for host, address in lines.items()))
        said = {"NAME": name, "ADDRESS": others.get(name, ""), "HOSTS": str(hosts), "SHM": shm}
        places = {"ROOT": str(root), "VOLUME": str(volume or ""), "SECRETS": str(given)}
        with self.log.open("ab") as log:
            self._unshare = subprocess.Popen(
                [*apart, "sh", "-c", script, "sh", image.workdir, *image.entrypoint, *image.command],
                env={**os.environ, **places, **said},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if network is not None:
            network.plug_in(name, self.first)

    @property
    def first(self) -> int:
        """Process 1, as this machine numbers it."""
        listed = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        while not (children := listed.read_text().split()):  # for a moment: it is being made
            time.sleep(0.01)
        return int(children[0])

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As `docker exec`."""
        enter = ["nsenter", f"--target={self.first}", "--root", "--wd", *(f"--{name}" for name in APART)]
        inside = ["sh", "-c", f'exec setpriv {self._who} env -i {self._env} "$@"', "sh", *command]
        return subprocess.run([*enter, *inside], capture_output=True, text=True, timeout=300)

    def output(self, *command: str) -> str:
        done = self.execute(*command)
        require(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def processes(self) -> Iterator[dict[str, str]]:
        """Of its namespace, as /proc/PID/status tells of them."""
        namespace = os.readlink(f"/proc/{self.first}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/pid") != namespace:
                    continue
                lines = (folder / "status").read_text().splitlines()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # gone, or a zombie's namespace, which cannot be read
                continue
            yield {**dict(line.split(":\t", 1) for line in lines if ":\t" in line), "command": command}

    def zombies(self) -> list[str]:
        listed = self.output("sh", "-c", "cat /proc/[0-9]*/status 2>/dev/null || true")
        return re.findall(r"Name:\t(\S+)\n(?:Umask.*\n)?State:\tZ", listed)

    def is_healthy(self) -> bool:
        return self._unshare.poll() is None and self.execute(*self._image.health).returncode == 0

    def stop(self) -> tuple[int, float]:
        """SIGTERM to process 1, as `docker stop`; the exit code, and seconds."""
        began = time.monotonic()
        os.kill(self.first, signal.SIGTERM)
        return self._unshare.wait(timeout=60), time.monotonic() - began

    def wait(self) -> int:
        return self._unshare.wait(timeout=120)

    def kill(self) -> None:
        self._unshare.kill()
        self._unshare.wait()


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"FAILED: {what}")


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = 600) -> None:
    began = time.monotonic()
    while not is_so():
        require(time.monotonic() - began < seconds, f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(0.5)
    print(f"ok  {what}, after {time.monotonic() - began:.1f} s", flush=True)


def new_volume(root: Path, volume: Path) -> None:
    shutil.rmtree(volume.parent, ignore_errors=True)
    fill_volume(root, volume)


def fill_volume(root: Path, volume: Path) -> None:
    """As an engine makes it: with contents and owner of the image's folder."""
    shutil.copytree(root / "data", volume)
    of_image = (root / "data").stat()
    os.chown(volume, of_image.st_uid, of_image.st_gid)


def make_secret(folder: Path, name: str, value: str) -> None:
    """As up.sh leaves it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / name).write_text(value + "\n")
    (folder / name).chmod(0o444)


def live(image: Image, systems: RootFileSystems, folder: Path) -> None:
    """What compose.yaml and the manifests rely on, looked at."""
    root, volume, given = systems.root(image.stage), folder / "life" / "volume", folder / "life" / "secrets"
    new_volume(root, volume)
    given.mkdir(mode=0o700)
    token = f"frt_{secrets.token_hex(6)}_{secrets.token_hex(32)}"

    def ok(holds: bool, what: str) -> None:
        require(holds, f"{what}\n--\n{started.log.read_text(errors='replace')[-3000:]}")
        print(f"ok  {what}", flush=True)

    def start() -> Container:
        return Container(image, root, volume, given)

    started = start()
    ok(started.wait() == 1, "without a token it does not listen off loopback")
    ok("no valid token" in started.log.read_text(), "and says so")

    make_secret(given, "fraternal_admin_token", token)
    started = start()
    wait_until(started.is_healthy, "its health check passes")
    first = Path(f"/proc/{started.first}/comm").read_text().strip()
    ok(first == "tini", "process 1 is tini")
    ok({one["Uid"].split()[0] for one in started.processes()} == {image.user.split(":")[0]}, "nobody is root")
    ok({one["CapEff"] for one in started.processes()} == {"0" * 16}, "nobody can do what only root can")
    ok(started.execute("touch", "/opt/x").returncode != 0, "the root file system is read-only")
    tools = [name for name in ("gcc", "cc", "make", "git") if started.execute("which", name).returncode == 0]
    ok(not tools, "there are no build tools")
    extras = started.output("python", "-c", "import psycopg, s3fs, torch; print(torch.__version__)")
    ok(bool(extras), f"PostgreSQL's and S3's drivers are there, and torch {extras.strip()}")
    ok(started.execute("fraternal", "ls").returncode == 1, "without its token it tells nobody anything")
    sweep = submit(started)

    def epochs() -> int:
        return int(str(told(started)["epochs_done"]))

    wait_until(lambda: epochs() >= 2, "a sweep's trials have finished epochs, without a network")
    drivers = [one for one in started.processes() if "service.drive" in one["command"]]
    ok(len(drivers) == 1, "a driver runs")
    os.kill(int(drivers[0]["Pid"]), signal.SIGKILL)
    wait_until(lambda: not started.zombies(), "of a driver killed no zombie is left")
    reached = epochs()
    wait_until(lambda: epochs() > reached, "another driver goes on")
    code, seconds = started.stop()
    ok(code == 0, f"stopped by SIGTERM it ends with 0, after {seconds:.1f} s")
    ok("the drivers are stopped too" in started.log.read_text(), "and has ended the drivers in order")

    started = start()
    wait_until(started.is_healthy, "started once more, it is healthy")
    ok(epochs() >= reached, "the sweep is where it was")
    wait_until(lambda: told(started)["state"] == "succeeded", "the sweep goes on to its end")
    started.output(*CLIENT, "fetch", sweep, "--out", "/data/best.tar")
    ok((volume / "best.tar").stat().st_size > 10_000, "its best checkpoint can be fetched")
    ok(not started.zombies(), "there are no zombies")
    started.output("fraternal", "backup", "/data/backups/monday")
    ok(started.stop()[0] == 0, "it ends with 0")

    restored = folder / "life" / "restored"
    fill_volume(root, restored)
    shutil.copytree(volume / "backups", restored / "backups")  # root's, as what is mounted may be
    started = Container(replace(image, command=["restore", "/data/backups/monday"]), root, restored, given)
    ok(started.wait() == 0, "a backup is restored into an empty volume")
    started = Container(image, root, restored, given)
    wait_until(started.is_healthy, "a service begins with it")
    ok(told(started)["state"] == "succeeded", "and has the sweep")
    ok(started.stop()[0] == 0, "it ends with 0, too")
    ok(token not in started.log.read_text(), "the token stands nowhere in the log")


def submit(started: Container, trials: int = 4, epochs: int = 12) -> str:
    """A sweep; its id."""
    parts = [f"corpus.{part}_tokens={tokens}" for part, tokens in TOKENS.items()]
    small = [*parts, f"budget.trials={trials}", f"training.epochs={epochs}", 'pruner={"name": "none"}']
    options = [part for setting in small for part in ("--set", setting)]
    asked = started.output(*CLIENT, "submit", "--preset", "quickstart", *options, "--json")
    return str(json.loads(asked)["id"])


def told(started: Container) -> dict[str, object]:
    """What the service says of its one sweep."""
    return dict(json.loads(started.output(*CLIENT, "ls", "--json"))[0])


def composed(image: Image, root: Path) -> dict[str, Image]:
    """What compose.cluster.yaml makes of it, with the defaults of its variables. The image reads YAML."""
    read = "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)['services']))"
    done = subprocess.run(
        ["chroot", root, "/opt/fraternal/bin/python", "-c", read],
        input=re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DOCKERFILE.parent / "compose.cluster.yaml").read_text()),
        capture_output=True,
        check=True,
        text=True,
    )
    return {
        name: replace(
            image,
            env={**image.env, **service["environment"]},
            entrypoint=service.get("entrypoint", image.entrypoint),
            command=service.get("command", image.command),
            health=service["healthcheck"]["test"][1:] if "healthcheck" in service else image.health,
        )
        for name, service in json.loads(done.stdout).items()
    }


def live_in_a_cluster(image: Image, systems: RootFileSystems, folder: Path) -> None:
    """What compose.cluster.yaml says, each service of it a container with an address of its own."""
    root, volume = systems.root(image.stage), folder / "cluster" / "volume"
    new_volume(root, volume)
    of_cluster, of_service = volume.parent / "of-cluster", volume.parent / "of-service"
    for given in (of_cluster, of_service):
        make_secret(given, "ray_auth_token", secrets.token_hex(32))
    shutil.copy2(of_cluster / "ray_auth_token", of_service)
    make_secret(of_service, "fraternal_admin_token", f"frt_{secrets.token_hex(6)}_{secrets.token_hex(32)}")
    images, network = composed(image, root), Network()
    for number, name in enumerate(("controller", "ray-head", "ray-worker", "second"), start=2):
        network.addresses[name] = f"{PREFIX}.{number}"
    started: dict[str, Container] = {}

    def start(service: str, name: str = "") -> Container:
        alone = service == "ray-head"
        made = Container(
            images[service],
            root,
            None if alone else volume,
            of_service if service == "controller" else of_cluster,
            name=name or service,
            shm="512m" if service == "controller" else "256m",
            network=network,
        )
        started[name or service] = made
        wait_until(made.is_healthy, f"{name or service} is healthy", 120)
        return made

    def at_work(node: Container) -> bool:
        return any(one["Name"].startswith(TRAINING) for one in node.processes())

    try:
        head, worker, controller = start("ray-head"), start("ray-worker"), start("controller")
        for node in (head, worker):
            nobody = {one["Uid"].split()[0] for one in node.processes()} == {image.user.split(":")[0]}
            require(nobody, "nobody is root")
        require(not (volume / "nodes").exists(), "no corpus is there yet")
        submit(controller, trials=2, epochs=6)
        wait_until(lambda: int(str(told(controller)["epochs_done"])) >= 2, "trials have finished epochs")
        require(at_work(worker), "they are the worker's")
        require(not at_work(head), "and none is the head's")
        print("ok  they run in the worker's container", flush=True)
        code, seconds = worker.stop()
        require(seconds < 30, "a worker that is stopped ends before an engine kills it")
        print(f"ok  a worker is stopped, after {seconds:.1f} s, with {code}", flush=True)
        second = start("ray-worker", "second")
        wait_until(lambda: at_work(second), "another one goes on")
        wait_until(lambda: told(controller)["state"] == "succeeded", "the sweep goes on to its end")
        for name in ("controller", "second", "ray-head"):
            code, seconds = started[name].stop()
            print(f"ok  {name} is stopped, after {seconds:.1f} s, with {code}", flush=True)
    except SystemExit:
        for name, one in started.items():
            print(f"-- {name}\n{one.log.read_text(errors='replace')[-2000:]}", flush=True)
        raise
    finally:
        for one in started.values():
            one.kill()
        network.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", action="append", default=[], type=Path, metavar="PATH")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--folder", default=REPOSITORY / "build" / "rehearsal", type=Path)
    parser.add_argument("--reuse", action="store_true", help="do not build again")
    options = parser.parse_args()
    for tool in ("debootstrap", "unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing: apt-get install debootstrap util-linux iproute2")
    if os.geteuid() != 0:
        raise SystemExit("only root may make root file systems")
    if os.readlink("/proc/self/ns/mnt") == os.readlink(f"/proc/{os.getppid()}/ns/mnt"):
        # What is mounted here is gone with this process, whatever becomes of it.
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    systems = RootFileSystems(folder, options.mirror, options.bind)
    engine: Engine = _OnlyMounted(systems) if options.reuse else systems
    began = time.monotonic()
    image = build(parse(DOCKERFILE.read_text()), engine, dict(one.split("=", 1) for one in options.build_arg))
    for stage in ("dependencies", "wheel", image.stage):
        print(f"    stage {stage}: {systems.size(stage)}")
    print(f"ok  built, in {time.monotonic() - began:.0f} s", flush=True)
    live(image, systems, folder)
    live_in_a_cluster(image, systems, folder)


class _OnlyMounted:
    """The stages as they were built last."""

    def __init__(self, systems: RootFileSystems) -> None:
        self._systems = systems

    def begin(self, stage: str, base: str) -> None:
        self._systems.begin(stage, base, anew=False)

    def copy(self, stage: str, sources: list[str], target: str, origin: str | None) -> None: ...

    def run(self, stage: str, command: str, image: Image, mounts: list[dict[str, str]]) -> None: ...


if __name__ == "__main__":
    main()
