"""The doctor's check of the Prefect API, against a server that answers as one would."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import pytest

from engine import FindingStatus
from flows import doctor_services
from flows.doctor_services import check_prefect_api

PREFECT = version("prefect")


class Api:
    """Answers every question with the same, and remembers the last one."""

    def __init__(self) -> None:
        self.status = 200
        self.body = json.dumps(PREFECT)
        self.path = ""
        self.authorization: str | None = None
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.path = self.path
                api.authorization = self.headers["Authorization"]
                self.send_response(api.status)
                self.end_headers()
                self.wfile.write(api.body.encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/api"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    api = Api()
    thread = threading.Thread(target=api.server.serve_forever)
    thread.start()
    yield api
    api.server.shutdown()
    thread.join()
    api.server.server_close()


def test_an_api_of_the_same_version_is_ok(api: Api) -> None:
    finding = check_prefect_api({"PREFECT_API_URL": api.url})
    assert (finding.status, finding.found) == (FindingStatus.OK, f"{api.url}, Prefect {PREFECT}")
    assert (api.path, api.authorization) == ("/api/admin/version", None)


def test_an_api_of_another_minor_version_is_a_warning(api: Api) -> None:
    api.body = json.dumps("3.1.0")
    finding = check_prefect_api({"PREFECT_API_URL": api.url})
    assert finding.status is FindingStatus.WARNING
    assert finding.found == f"{api.url} is Prefect 3.1.0, and here it is {PREFECT}"


@pytest.mark.parametrize(
    ("variable", "value", "header"),
    [
        ("PREFECT_API_KEY", "pnu_1", "Bearer pnu_1"),
        ("PREFECT_API_AUTH_STRING", "ada:secret", "Basic YWRhOnNlY3JldA=="),
    ],
)
def test_a_user_who_has_a_key_shows_it(api: Api, variable: str, value: str, header: str) -> None:
    check_prefect_api({"PREFECT_API_URL": api.url, variable: value})
    assert api.authorization == header


@pytest.mark.parametrize("code", [401, 403])
def test_an_api_that_refuses_a_key_is_an_error(api: Api, code: int) -> None:
    api.status = code
    finding = check_prefect_api({"PREFECT_API_URL": api.url, "PREFECT_API_KEY": "pnu_old"})
    assert finding.status is FindingStatus.ERROR
    assert f"refuses this user (HTTP {code})" in finding.found


def test_an_api_that_wants_a_key_which_the_environment_has_not_is_a_warning(api: Api) -> None:
    api.status = 401
    finding = check_prefect_api({"PREFECT_API_URL": api.url})
    assert finding.status is FindingStatus.WARNING
    assert "those of a Prefect profile were not tried" in str(finding.remedy)


def test_url_and_key_of_a_profile_belong_together(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = {"PREFECT_API_URL": api.url, "PREFECT_API_KEY": "pnu_1"}
    monkeypatch.setattr(doctor_services, "_profile_settings", lambda: profile)
    assert check_prefect_api({}).status is FindingStatus.OK
    assert api.authorization == "Bearer pnu_1"


def test_a_server_without_that_page_may_still_be_one(api: Api) -> None:
    api.status = 404
    assert check_prefect_api({"PREFECT_API_URL": api.url}).status is FindingStatus.WARNING


@pytest.mark.parametrize("body", ["<html>", '{"version": 1}'])
def test_another_server_at_that_place_is_an_error(api: Api, body: str) -> None:
    api.body = body
    assert check_prefect_api({"PREFECT_API_URL": api.url}).status is FindingStatus.ERROR


def test_an_api_that_does_not_run_is_an_error_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    finding = check_prefect_api({"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"})
    assert finding.status is FindingStatus.ERROR
    assert "Connection refused" in finding.found
    assert "prefect server start" in str(finding.remedy)


def test_what_is_no_url_is_an_error() -> None:
    finding = check_prefect_api({"PREFECT_API_URL": "file:///etc/passwd"})
    assert finding.status is FindingStatus.ERROR
    assert "it is no http or https URL" in finding.found


def test_a_password_in_the_url_is_not_shown(api: Api) -> None:
    url = api.url.replace("//", "//ada:secret@")
    assert "secret" not in check_prefect_api({"PREFECT_API_URL": url}).found


def test_without_an_api_the_check_says_what_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_services, "_profile_settings", dict)
    finding = check_prefect_api({})
    assert finding.status is FindingStatus.OK
    assert "starts a server of its own" in finding.found
