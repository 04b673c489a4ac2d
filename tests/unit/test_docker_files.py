"""The images and the compose file, as far as they can be checked without a Docker engine."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.ledger_url import LEDGER_URL_VARIABLE

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "npu.Dockerfile"]
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def copied_of(dockerfile: Path) -> list[str]:
    """Return what a Dockerfile copies from the repository."""
    lines = dockerfile.read_text(encoding="utf-8").splitlines()
    copies = [line.split()[1:-1] for line in lines if re.match(r"COPY (?!--from)", line)]
    return [name for names in copies for name in names]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_sent_to_the_builder(dockerfile: Path):
    sent = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = copied_of(dockerfile)
    assert {"pyproject.toml", "engine", "flows", "deployments", "configs"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert set(copied) == sent


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_runs_as_a_user_without_rights_and_tells_its_health(dockerfile: Path):
    text = dockerfile.read_text(encoding="utf-8")
    stage = text[text.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.+)$", stage, re.MULTILINE) == ["10001"]
    assert "\nHEALTHCHECK " in stage
    # A worker of Prefect alone would kill its runs when the container is stopped.
    assert re.search(r'^CMD \["[^"]*python", "deployments/worker\.py", ', stage, re.MULTILINE)
    # The web server that the check asks is one of the worker's options.
    assert '"--with-healthcheck"]' in stage
    assert not re.search(r"(?i)password|secret|token=", text)


def test_only_this_machine_reaches_a_port():
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []
    assert "ports" not in SERVICES["postgres"]


def test_a_password_comes_from_the_environment_and_has_no_default():
    text = (DOCKER / "compose.yml").read_text(encoding="utf-8")
    in_urls = re.findall(r"://\w+:(.*?)@", text)
    given = [*in_urls, SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"]]
    assert len(given) == 3
    assert all(re.fullmatch(r"\$\{POSTGRES_PASSWORD:\?[^}]*\}", value) for value in given)


def test_only_the_worker_knows_the_ledgers_password():
    assert [
        name for name, service in SERVICES.items() if LEDGER_URL_VARIABLE in service["environment"]
    ] == ["worker"]


def test_a_login_for_the_server_is_passed_on_and_never_an_empty_one():
    """An empty one would be asked for too; a name without a value is left out when it is unset."""
    asked = SERVICES["server"]["environment"]
    assert asked["PREFECT_SERVER_API_AUTH_STRING"] is None
    for client in ("deploy", "worker"):
        environment = SERVICES[client]["environment"]
        assert environment["PREFECT_API_AUTH_STRING"] is None
        assert "PREFECT_API_AUTH_STRING" in environment


def test_no_service_may_gain_rights_and_none_is_mounted_where_it_could_write_code():
    for name in ("server", "deploy", "worker"):
        service = SERVICES[name]
        assert (service["cap_drop"], service["security_opt"]) == (
            ["ALL"],
            ["no-new-privileges:true"],
        )
    folders = [v.split(":")[1] for service in SERVICES.values() for v in service.get("volumes", [])]
    assert [f for f in folders if f.startswith("/opt/") and f != "/opt/tokenmill/runs"] == []


def test_folders_that_a_service_writes_belong_to_its_user():
    """The packages belong to root, and Prefect would copy its UI among them."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    owned = set(re.findall(r"install -d -o tokenmill -g tokenmill (.+)$", text, re.M)[0].split())
    volumes = [
        v.split(":")
        for name in ("server", "worker")
        for v in SERVICES[name]["volumes"]
        if v.split(":")[0] in COMPOSE["volumes"]
    ]
    assert owned == {volume[1] for volume in volumes}
    assert re.search(r"PREFECT_SERVER_UI_STATIC_DIRECTORY=/home/tokenmill/", text)


def test_a_service_that_is_waited_for_tells_its_health():
    waits = {
        (other, wait["condition"])
        for service in SERVICES.values()
        for other, wait in service.get("depends_on", {}).items()
    }
    assert {other for other, _ in waits} == {"postgres", "server", "deploy"}
    for other, condition in waits:
        if condition == "service_healthy":
            assert "test" in SERVICES[other]["healthcheck"]
        else:
            assert "restart" not in SERVICES[other]  # it must come to an end


def test_volumes_and_files_that_are_mounted_exist():
    mounted = [v for service in SERVICES.values() for v in service.get("volumes", [])]
    sources = {volume.split(":")[0] for volume in mounted if not volume.startswith("${")}
    files = {source for source in sources if source.startswith(".")}
    assert sources - files == set(COMPOSE["volumes"])
    assert [name for name in files if not (DOCKER / name).exists()] == []


def test_worker_and_server_speak_of_one_ledger_and_one_pool():
    assert SERVICES["worker"]["environment"]["TOKENMILL_LEDGER_URL"].endswith(
        "@postgres:5432/ledger"
    )
    assert (DOCKER / "create-ledger.sql").read_text() == "CREATE DATABASE ledger;\n"
    script = SERVICES["deploy"]["command"][-1]
    pool = re.search(r"work-pool create (\w+)", script)
    assert pool is not None
    assert f'"--pool", "{pool[1]}"' in (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    for path in re.findall(r"deployments/\S+", script):
        assert (ROOT / path).exists()
