"""docker/: what can be known of images, compose files and manifests without an engine or a cluster.

`make rehearse` carries out the Dockerfile for real; here is that it would be the same steps.
"""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from service.settings import Settings
from service.tokens import parse_token
from tests.played_service import played_service
from tests.service_process import wait_until

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SECRETS = {"fraternal_admin_token", "fraternal_database_password"}
"""Of the service; Ray's are its own."""
VOLUME = "/data"
"""What the image keeps for longer than a container's life."""
DIGEST = re.compile(r"[a-z/]+:\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}")


def found(*names: str) -> str:
    """A tool beside this Python, or elsewhere on the path; the test is skipped where there is none."""
    for name in names:
        tool = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if tool is not None:
            return tool
    pytest.skip(f"{names[0]} is not there: pip install 'fraternal[dev]'")


def loaded_rehearsal() -> ModuleType:
    named = importlib.util.spec_from_file_location("rehearse", DOCKER / "rehearse.py")
    assert named is not None
    assert named.loader is not None
    module = importlib.util.module_from_spec(named)
    sys.modules["rehearse"] = module  # where its dataclasses look themselves up
    named.loader.exec_module(module)
    return module


rehearse = loaded_rehearsal()


class Noting:
    """An engine that carries nothing out."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.copied: list[tuple[list[str], str, str | None]] = []
        self.ran: list[tuple[str, dict[str, str], list[dict[str, str]]]] = []

    def begin(self, stage: str, base: str) -> None:
        self.begun.append((stage, base))

    def copy(self, stage: str, sources: list[str], target: str, origin: str | None) -> None:
        self.copied.append((sources, target, origin))

    def run(self, stage: str, command: str, image: Any, mounts: list[dict[str, str]]) -> None:
        self.ran.append((command, dict(image.env), mounts))


def noted(**build_args: str) -> tuple[Noting, Any]:
    engine = Noting()
    return engine, rehearse.build(rehearse.parse(DOCKERFILE), engine, build_args)


# The Dockerfile.


def test_the_dockerfile_passes_hadolint() -> None:
    done = subprocess.run([found("hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_rehearsal_runs_the_very_steps_of_the_dockerfile() -> None:
    engine, _ = noted()
    without_comments = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    steps = re.findall(r"^RUN (?:--mount=\S+\s+\\\n\s+)?((?:.*\\\n)*.*)$", without_comments, re.MULTILINE)
    assert len(steps) == without_comments.count("\nRUN ") == 8

    def words(command: str) -> list[str]:
        return command.replace("\\\n", " ").split()

    assert [words(command) for command, _, _ in engine.ran] == [words(step) for step in steps]
    assert [stage for stage, _ in engine.begun] == ["dependencies", "wheel", "final"]
    assert engine.ran[-1][2] == [
        {"type": "bind", "from": "wheel", "source": "/wheels", "target": "/wheels"},
    ]


def test_the_rehearsal_passes_over_nothing_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="SHELL is not known here"):
        rehearse.build(rehearse.parse('FROM a\nSHELL ["bash"]'), Noting(), {})


def test_a_build_argument_chooses_the_build_of_torch() -> None:
    for given, index in (
        ({}, "https://download.pytorch.org/whl/cpu"),
        ({"TORCH_INDEX_URL": "https://pypi.org/simple"}, "https://pypi.org/simple"),
    ):
        engine, _ = noted(**given)
        command, env, _ = engine.ran[0]
        assert env["TORCH_INDEX_URL"] == index
        assert '--index-url "${TORCH_INDEX_URL}" torch==' in command


def test_every_torch_is_the_projects() -> None:
    (wanted,) = [one for one in PROJECT["project"]["dependencies"] if one.startswith("torch")]
    assert set(re.findall(r"torch==[\w.]+", DOCKERFILE)) == {wanted}
    assert wanted in (ROOT / "Makefile").read_text()


def test_base_images_are_pinned_by_tag_and_digest_and_have_a_python_that_we_support() -> None:
    engine, _ = noted()
    bases = {base for _, base in engine.begun}
    database = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["database"]["image"]
    for image in (*bases, database):
        assert DIGEST.fullmatch(image), image
    (base,) = bases
    python = re.search(r"^python:([\d.]+)-", base)
    assert python is not None
    assert Requirement(f"python{PROJECT['project']['requires-python']}").specifier.contains(python[1])
    assert python[1].rpartition(".")[0] == f"{sys.version_info[0]}.{sys.version_info[1]}", (
        "which the tests run on"
    )


def included(path: str) -> bool:
    """Whether .dockerignore, a list of exceptions from nothing at all, lets it into the context."""
    rules = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert rules[0] == "*"
    return any(path == rule[1:] or path.startswith(rule[1:] + "/") for rule in rules if rule[0] == "!")


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    engine, _ = noted()
    copied = {source for sources, _, origin in engine.copied if origin is None for source in sources}
    assert all((ROOT / source).exists() for source in copied)
    assert all(included(source) for source in copied)
    for path in (
        ".git/config",
        "docker/secrets/fraternal_admin_token",
        "fraternal-data/fraternal.db",
        ".venv",
    ):
        assert not included(path)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:
        let_in = {path for path in tracked.stdout.split() if included(path)}
        assert {
            path for path in let_in if not any(f"{path}/".startswith(f"{one}/") for one in copied)
        } == set()
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) <= copied


def test_the_image_is_of_a_user_without_rights_and_process_1_is_an_init() -> None:
    _, image = noted()
    assert image.user == "10001:10001", "by numbers: Kubernetes asks whether that is root"
    assert image.entrypoint == ["tini", "--", "fraternal"]
    assert image.command == ["serve", "--stop-drivers"]
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert not re.search(r"\b(gcc|g\+\+|make|git|build-essential|curl)\b", last)
    assert {"FRATERNAL_HOST": "0.0.0.0", "TZ": "UTC", "LANG": "C.UTF-8"}.items() <= image.env.items()


def test_ray_reads_what_the_image_says_to_it() -> None:
    """Of its logs, which are in the memory that /tmp is: a misspelt name would be passed over in silence."""
    import ray

    _, image = noted()
    raylet = (Path(ray.__file__).parent / "core/src/ray/raylet/raylet").read_bytes()
    names = [name for name in image.env if name.startswith(("RAY_", "GRPC_"))]
    assert sorted(names) == ["GRPC_DNS_RESOLVER", "RAY_ROTATION_BACKUP_COUNT", "RAY_ROTATION_MAX_BYTES"]
    assert [name for name in names if name.encode() not in raylet] == []
    files = int(image.env["RAY_ROTATION_MAX_BYTES"]) * (1 + int(image.env["RAY_ROTATION_BACKUP_COUNT"]))
    assert files <= 2 * 2**30 / 50, "dozens of them fit into what FRATERNAL_TMP is by default"


def test_the_service_has_a_folder_of_the_volume_so_that_a_backup_can_be_restored_there() -> None:
    """Where a file system is mounted, `fraternal restore` refuses: nothing can be renamed to it."""
    _, image = noted()
    assert Path(image.env["FRATERNAL_DATA_DIR"]).parent == Path(VOLUME) == Path(image.workdir)
    assert f"--mode=0750 {VOLUME}\n" in DOCKERFILE


def test_the_health_check_tells_a_ready_service_from_none(tmp_path: Path) -> None:
    _, image = noted()
    python, *arguments = image.health
    assert python == "python"

    def check(port: int) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "FRATERNAL_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)

    with played_service(tmp_path / "idle", plays=False) as client:
        done = check(client.base_url.port or 0)
        assert (done.returncode, "the reconciler has not looked" in done.stdout) == (1, True)
    with played_service(tmp_path / "plays") as client:
        port = client.base_url.port or 0
        wait_until(lambda: check(port).returncode == 0, "it is healthy", lambda: check(port).stdout)
        assert '"status":"ready"' in check(port).stdout
    assert check(port).returncode == 1


# The locks.


def locked(name: str) -> dict[str, str]:
    """Versions by name; every one of them has hashes."""
    text = (DOCKER / name).read_text()
    blocks = re.findall(
        r"^([a-z0-9-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE
    )
    assert len(blocks) == len(re.findall(r"^[^\s#]", text, re.MULTILINE)) > 3
    return {name: version for name, version, _ in blocks}


def test_the_lock_is_what_the_project_asks_for() -> None:
    pinned = locked("requirements.txt")
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *extras["postgres"], *extras["s3"]]
    assert "torch" not in pinned, "whose build is chosen"
    for one in map(Requirement, asked):
        if one.name != "torch":
            version = pinned[canonicalize_name(one.name)]
            assert one.specifier.contains(version), f"{one}, but locked is {version}: `make lock`"
    build = locked("build-requirements.txt")
    for one in map(Requirement, PROJECT["build-system"]["requires"]):
        assert one.specifier.contains(build[one.name]), one


def test_the_lock_is_whole() -> None:
    """What is locked and installed here asks for nothing that is not locked, too."""
    pinned = locked("requirements.txt")
    looked_at = 0
    extras = {"ray": ["tune"], "psycopg": ["binary"]}
    for name in pinned:
        try:
            if version(name) != pinned[name]:
                continue
        except PackageNotFoundError:  # of an extra that is not installed here
            continue
        asked = [Requirement(one) for one in requires(name) or []]
        looked_at += 1
        wanted = ["", *extras.get(name, [])]
        for one in asked:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in wanted):
                assert canonicalize_name(one.name) in {*pinned, "torch"}, f"{name} needs {one}: `make lock`"
    assert looked_at > 50


# Compose.


def composed(tmp_path: Path, *files: str, **environment: str) -> dict[str, Any]:
    """What `docker compose config` makes of them."""
    here = tmp_path / "docker"
    if not here.exists():
        of_whoever_runs_it = shutil.ignore_patterns("secrets", "corpora", ".env", "compose.own.yaml")
        shutil.copytree(DOCKER, here, ignore=of_whoever_runs_it)
        (here / "secrets").mkdir()
        for name in {*SECRETS, "ray_auth_token"}:
            (here / "secrets" / name).write_text("planted-xyzzy")
    options = [part for name in files for part in ("--file", name)]
    command = [found("docker-compose"), *options, "config"]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "xyzzy" not in done.stdout
    return dict(yaml.safe_load(done.stdout))


def test_docker_compose_takes_the_composition(tmp_path: Path) -> None:
    whole = composed(tmp_path, "compose.yaml")
    assert set(whole["services"]) == {"controller", "database"}, "nothing that nobody uses is started"
    for name, service in whole["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert "/tmp" in {mount.partition(":")[0] for mount in service["tmpfs"]}, name
    controller, database = whole["services"]["controller"], whole["services"]["database"]
    assert controller["ports"] == [
        {"mode": "ingress", "host_ip": "127.0.0.1", "target": 8123, "published": "8123", "protocol": "tcp"}
    ]
    assert {mount["target"] for mount in controller["volumes"]} == {VOLUME, "/corpora"}
    assert {secret["source"] for secret in controller["secrets"]} == SECRETS
    assert "ports" not in database
    assert whole["networks"]["inside"]["internal"]
    assert list(database["networks"]) == ["inside"]
    (password,) = database["secrets"]
    assert database["environment"]["POSTGRES_PASSWORD_FILE"] == password["target"]
    assert password["source"] == "fraternal_database_password"
    version = PROJECT["project"]["version"]
    assert controller["image"] == f"fraternal:{version}-cpu"
    assert f"ARG VERSION={version}\n" in DOCKERFILE


def test_what_compose_is_told_by_the_environment_reaches_the_service(tmp_path: Path) -> None:
    given = {"FRATERNAL_CPUS": "1.5", "FRATERNAL_MEMORY": "4g", "FRATERNAL_LISTEN": "0.0.0.0:80"}
    controller = composed(tmp_path, "compose.yaml", **given)["services"]["controller"]
    assert (float(controller["cpus"]), int(controller["mem_limit"])) == (1.5, 4 * 2**30)
    assert (controller["ports"][0]["host_ip"], controller["ports"][0]["published"]) == ("0.0.0.0", "80")


def test_docker_compose_takes_the_gpu_variant(tmp_path: Path) -> None:
    controller = composed(tmp_path, "compose.yaml", "compose.gpu.yaml")["services"]["controller"]
    assert controller["build"]["args"] == {"TORCH_INDEX_URL": "https://pypi.org/simple"}
    assert controller["image"].endswith("-cuda")
    (device,) = controller["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])


CLUSTER = ("compose.yaml", "compose.cluster.yaml")


def test_docker_compose_takes_the_cluster(tmp_path: Path) -> None:
    services = composed(tmp_path, *CLUSTER, FRATERNAL_WORKERS="3", FRATERNAL_WORKER_CPUS="2")["services"]
    assert set(services) == {"controller", "database", "ray-head", "ray-worker"}
    controller, head, worker = (services[name] for name in ("controller", "ray-head", "ray-worker"))
    assert len({service["image"] for service in (controller, head, worker)}) == 1
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert ("ports" in service) == (name == "controller"), "nothing else is published"
    assert services["database"]["networks"].keys().isdisjoint({*head["networks"], *worker["networks"]})
    assert list(head["networks"]) == list(worker["networks"]) == ["cluster"]
    assert "cluster" in controller["networks"]
    for service in (head, worker):
        assert [secret["source"] for secret in service["secrets"]] == ["ray_auth_token"]
        assert int(service["shm_size"]) > 104857600, "the object store fits"
    for service in (controller, head, worker):
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        target = {secret["source"]: secret["target"] for secret in service["secrets"]}["ray_auth_token"]
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == target
    assert {name: one["condition"] for name, one in controller["depends_on"].items()} == {
        "database": "service_healthy",
        "ray-head": "service_healthy",
    }
    assert worker["depends_on"]["ray-head"]["condition"] == "service_healthy"
    for service in (controller, worker):
        assert service["depends_on"]["ray-head"]["restart"], "the old version ends before the new one"
    for service in (head, worker):
        assert service["pull_policy"] == "never", "it is built here"
    assert (worker["deploy"]["replicas"], float(worker["cpus"])) == (3, 2.0)
    assert worker["command"] == [f"--address={controller['environment']['FRATERNAL_RAY_ADDRESS']}"]

    def mounted(service: dict[str, Any]) -> set[tuple[str, str]]:
        return {(mount["source"], mount["target"]) for mount in service["volumes"]}

    assert mounted(controller) == mounted(worker), "one store, at one path, and the same corpora"


def test_the_clusters_gpus_are_its_workers(tmp_path: Path) -> None:
    services = composed(tmp_path, *CLUSTER, "compose.cluster.gpu.yaml", FRATERNAL_WORKERS="3")["services"]
    ray = {name: services[name] for name in ("controller", "ray-head", "ray-worker")}
    assert {service["image"].rpartition("-")[2] for service in ray.values()} == {"cuda"}
    assert "deploy" not in ray["controller"]
    deployed = ray["ray-worker"]["deploy"]
    (device,) = deployed["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
    assert deployed["replicas"] == 1, "several would each have all of them"


def started_with(options: list[str]) -> dict[str, Any]:
    """What `ray start` understands of its options. Raises click's errors."""
    from ray.scripts.scripts import start

    return dict(start.make_context("ray start", list(options)).params)


def test_ray_understands_the_cluster_of_the_composition() -> None:
    from trials.encoded import NODE_DIR

    services = yaml.safe_load((DOCKER / "compose.cluster.yaml").read_text())["services"]
    said = {}
    for name in ("ray-head", "ray-worker"):
        begin, options = services[name]["entrypoint"][:4], services[name]["entrypoint"][4:]
        assert begin == ["tini", "--", "ray", "start"]
        said[name] = started_with([*options, *services[name]["command"]])
        assert said[name]["block"], "or process 1 ends at once"
    head, worker = said["ray-head"], said["ray-worker"]
    assert (head["head"], head["num_cpus"], head["num_gpus"]) == (True, 0, 0), "no trial runs there"
    assert (worker["head"], worker["num_cpus"]) == (False, None), "as many as its container has"
    assert str(head["port"]) in services["ray-head"]["healthcheck"]["test"][-1]
    assert str(worker["node_manager_port"]) in services["ray-worker"]["healthcheck"]["test"][-1]
    ours = {name for name in services["ray-worker"]["environment"] if name.startswith("FRATERNAL_")}
    assert ours == {NODE_DIR}


README = (DOCKER / "README.md").read_text()


def test_what_the_readme_has_us_write_is_a_composition(tmp_path: Path) -> None:
    """Of .env, and of a file of one's own, by COMPOSE_FILE: as pasted."""
    written = dict(re.findall(r"^cat >>? (\S+) <<'END'\n(.*?)^END$", README, re.MULTILINE | re.DOTALL))
    assert set(written) == {".env", "compose.own.yaml"}
    composed(tmp_path, "compose.yaml")
    here = tmp_path / "docker"
    (here / "secrets" / "aws").touch()
    (here / "compose.own.yaml").write_text(written["compose.own.yaml"])
    (here / ".env").write_text(written[".env"])
    services = composed(tmp_path)["services"]
    worker = services["ray-worker"]
    assert (worker["deploy"]["replicas"], float(worker["cpus"])) == (3, 2.0)
    files = re.findall(r"COMPOSE_FILE=([\w.:]+)", README)
    assert len(files) == 4
    for named in files:
        (here / ".env").write_text(f"COMPOSE_FILE={named}\n")
        services = composed(tmp_path)["services"]
        assert ("ray-worker" in services) == ("cluster" in named), named
        if "own" in named:
            assert services["controller"]["environment"]["FRATERNAL_STORE_URL"] == "s3://BUCKET/PREFIX"
            for name in ("controller", "ray-worker"):
                secret = services[name]["environment"]["AWS_SHARED_CREDENTIALS_FILE"]
                targets = {one["target"] for one in services[name]["secrets"]}
                assert {secret, "/run/secrets/ray_auth_token"} <= targets


def test_every_variable_of_a_composition_is_in_the_readme() -> None:
    files = [path.read_text() for path in DOCKER.glob("compose*.yaml")]
    named = {name for text in files for name in re.findall(r"\$\{(\w+)", text)}
    assert len(named) > 10
    assert {name for name in named if not re.search(rf"`{name}\b", README)} == set()


def test_commands_of_the_readme_fit_the_folder_that_they_are_asked_in() -> None:
    """compose knows what .env has in its own folder, where no file is named; secrets are in a closed one."""
    assert not re.search(r"docker compose (-f|--file)", README)
    mounted = re.findall(r"[\w$/\"]*secrets\S*:/run/secrets\S*", README)
    assert mounted, "in docker run"
    for source, target, _ in (mount.strip('"').split(":") for mount in mounted):
        assert {Path(source).name, Path(target).name} <= SECRETS, "files: nobody else enters the folder"


def test_settings_and_secrets_of_the_composition_are_the_services_own(tmp_path: Path) -> None:
    """A misspelt one would be passed over in silence."""
    fields = {f"fraternal_{name}" for name in Settings.model_fields}
    assert fields >= SECRETS
    controller = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["controller"]
    in_cluster = yaml.safe_load((DOCKER / "compose.cluster.yaml").read_text())["services"]["controller"]
    _, image = noted()
    named = (*controller["environment"], *in_cluster["environment"], *image.env)
    given = {name.lower() for name in named if name.startswith("FRATERNAL_")}
    assert given <= fields
    settings = Settings(
        data_dir=tmp_path,
        database_url=controller["environment"]["FRATERNAL_DATABASE_URL"],
        database_password="a/b",
    )
    assert settings.resolved_database_url == "postgresql+psycopg://fraternal:a%2Fb@database/fraternal"


def test_one_command_makes_secrets_once_and_brings_everything_up(tmp_path: Path) -> None:
    played, asked = played_engine(tmp_path)

    def up() -> str:
        done = played("--no-color")
        assert done.returncode == 0, done.stderr
        assert "http://0.0.0.0:80/" in done.stdout, "where it is reached, be that said in docker/.env"
        return done.stdout

    said = up()
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert set(made) == {*SECRETS, "ray_auth_token"}
    parse_token(made["fraternal_admin_token"].strip())
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "secrets").iterdir()} == {0o444}
    said += up()
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made
    assert not [secret for secret in made.values() if secret.strip() in said]
    begun = [line for line in asked.read_text().splitlines() if " up " in line]
    assert begun == [f"{tmp_path} compose up --build --detach --wait --no-color"] * 2


def test_no_secret_is_left_empty_where_none_could_be_made(tmp_path: Path) -> None:
    """It would be taken for one ever after."""
    played, asked = played_engine(tmp_path)
    broken = tmp_path / "bin" / "openssl"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert played().returncode != 0
    assert list((tmp_path / "secrets").iterdir()) == []
    assert not asked.exists(), "nothing is begun without them"
    broken.unlink()
    assert played().returncode == 0


def played_engine(folder: Path) -> tuple[Callable[..., subprocess.CompletedProcess[str]], Path]:
    """up.sh with a docker that only notes what it is asked, since there is none in tests; and these notes."""
    shutil.copy(DOCKER / "up.sh", folder)
    engine = folder / "bin" / "docker"
    engine.parent.mkdir()
    engine.write_text('#!/bin/sh\necho "$PWD $*" >> "$0.asked"\n[ "$2" != port ] || echo 0.0.0.0:80\n')
    engine.chmod(0o755)
    env = {**os.environ, "PATH": f"{engine.parent}:{os.environ['PATH']}"}

    def played(*options: str) -> subprocess.CompletedProcess[str]:
        command = [folder / "up.sh", *options]
        return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, umask=0o022)

    return played, engine.with_suffix(".asked")


# Kubernetes.


def manifests(*files: str) -> dict[str, Any]:
    """By kind; of a kind that is there more than once, the last one."""
    return {
        document["kind"]: document
        for name in files or ("controller/controller.yaml",)
        for document in read(name)
    }


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DOCKER / "kubernetes" / name).read_text()))


def ray_pods() -> dict[str, dict[str, Any]]:
    """Pods as KubeRay would make them, before it adds its own: by the name of their container."""
    spec = manifests("cluster/ray.yaml")["RayCluster"]["spec"]
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return {
        template["spec"]["containers"][0]["name"]: {"apiVersion": "v1", "kind": "Pod", **template}
        for template in templates
    }


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_manifests_are_valid_by_their_schemas(version: str) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="manifests are not checked: pip install kubernetes-validate"
    )
    kinds = manifests()
    assert set(kinds) == {"PersistentVolumeClaim", "Deployment", "Service", "PodDisruptionBudget"}
    for document in (*kinds.values(), *read("cluster/network.yaml"), *ray_pods().values()):
        kubernetes_validate.validate(document, version, strict=True)
    kinds["Deployment"]["spec"]["replicsa"] = 1
    worker = ray_pods()["ray-worker"]
    worker["spec"]["containers"][0]["envForm"] = []
    for wrong, word in ((kinds["Deployment"], "replicsa"), (worker, "envForm")):
        with pytest.raises(kubernetes_validate.ValidationError, match=word):
            kubernetes_validate.validate(wrong, version, strict=True)


RAY_CLUSTER = {
    "": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "authOptions": {"mode"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}
"""Of the fields in KubeRay's reference of ray.io/v1, those that we use: no package has its schema."""


def test_the_ray_cluster_has_fields_that_kuberay_knows_and_options_that_ray_does() -> None:
    cluster = manifests("cluster/ray.yaml")["RayCluster"]
    assert (cluster["apiVersion"], set(cluster)) == ("ray.io/v1", {"apiVersion", "kind", "metadata", "spec"})
    spec = cluster["spec"]
    (workers,) = spec["workerGroupSpecs"]
    assert set(spec) == RAY_CLUSTER[""]
    assert set(spec["authOptions"]) == RAY_CLUSTER["authOptions"]
    assert set(spec["headGroupSpec"]) == RAY_CLUSTER["headGroupSpec"]
    assert set(workers) == RAY_CLUSTER["workerGroupSpecs"]
    assert spec["authOptions"]["mode"] == "token"
    (pinned,) = [one for one in PROJECT["project"]["dependencies"] if one.startswith("ray[")]
    assert pinned.endswith(f"=={spec['rayVersion']}")
    assert 0 <= workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]

    def options(group: dict[str, Any]) -> list[str]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), (
            "KubeRay's are strings"
        )
        return [f"--{name}={value}" for name, value in group["rayStartParams"].items()]

    head = started_with(["--head", *options(spec["headGroupSpec"])])
    worker = started_with(["--address=fraternal-ray-head-svc:6379", *options(workers)])
    assert (head["num_cpus"], head["num_gpus"]) == (0, 0), "no trial runs there"
    (listening,) = ray_pods()["ray-worker"]["spec"]["containers"][0]["ports"]
    assert listening["containerPort"] == worker["node_manager_port"], "which its probes ask"


def test_the_pods_of_the_ray_cluster_fit_the_image_and_the_controller() -> None:
    _, image = noted()
    user, group = map(int, image.user.split(":"))
    cluster, (patch,) = manifests("cluster/ray.yaml")["RayCluster"], read("cluster/controller-patch.yaml")
    for name, pod in ray_pods().items():
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (user, group)
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(paths) == {image.env["HOME"], "/dev/shm"}
        assert set(paths.values()) == {volume["name"] for volume in spec["volumes"]}
    (controller,) = patch["spec"]["template"]["spec"]["containers"]
    settings = {one["name"]: one.get("value") for one in controller["env"]}
    name = cluster["metadata"]["name"]
    assert settings["FRATERNAL_RAY_ADDRESS"] == f"{name}-head-svc:6379", "as KubeRay names its service"
    fields = {f"FRATERNAL_{field}".upper() for field in Settings.model_fields}
    assert {one for one in settings if one.startswith("FRATERNAL_")} <= fields
    (token,) = [
        one["valueFrom"]["secretKeyRef"] for one in controller["env"] if one["name"] == "RAY_AUTH_TOKEN"
    ]
    assert token == {"name": name, "key": "auth_token"}, "as KubeRay names its secret"
    store = controller["envFrom"]
    assert store == ray_pods()["ray-worker"]["spec"]["containers"][0]["envFrom"] != []
    guarded, _ = read("cluster/network.yaml")
    assert guarded["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": name}


@pytest.mark.parametrize("which", ["single", "cluster"])
def test_kustomize_puts_the_image_everywhere(which: str) -> None:
    command = [found("kubectl"), "kustomize", DOCKER / "kubernetes" / which]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    images = re.findall(r"image: (\S+)", done.stdout)
    assert images == [f"fraternal:{PROJECT['project']['version']}-cpu"] * {"single": 1, "cluster": 3}[which]
    assert ("FRATERNAL_RAY_ADDRESS" in done.stdout) == (which == "cluster")


def test_the_manifests_fit_the_image_and_one_another() -> None:
    kinds = manifests()
    _, image = noted()
    spec = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    user, group = map(int, image.user.split(":"))
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (user, group)
    assert container["ports"][0]["containerPort"] == int(image.env["FRATERNAL_PORT"])
    assert not spec["enableServiceLinks"], "a Service named fraternal would set FRATERNAL_PORT to tcp://…"
    paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {VOLUME, image.env["HOME"], "/dev/shm"} <= set(paths)
    assert set(paths.values()) == {volume["name"] for volume in spec["volumes"]}
    (folder,) = [one["value"] for one in container["env"] if one["name"] == "FRATERNAL_SECRETS_DIR"]
    assert paths[folder] == "secrets"
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        kinds["Deployment"]["spec"]["selector"]["matchLabels"],
        kinds["Service"]["spec"]["selector"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert (kinds["Deployment"]["spec"]["replicas"], kinds["Deployment"]["spec"]["strategy"]) == (
        1,
        {"type": "Recreate"},
    )
    for which in ("single", "cluster"):
        (customized,) = read(f"{which}/kustomization.yaml")[0]["images"]
        assert customized["name"] == container["image"]
        assert customized["newTag"] == f"{Version(PROJECT['project']['version'])}-cpu"
