"""What a person sees of a job in Prefect's UI, read by a browser from the server's own pages.

With TOKENMILL_UI_PICTURES=FOLDER a picture of each page is left there.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path
from uuid import UUID

import pytest
from job_builders import make_job, questions
from playwright.sync_api import Browser, Locator, Page, TimeoutError, sync_playwright
from prefect_processes import Prefect, Worker, wait_until

from flows.config import JobConfig

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no browser: apt-get install chromium, or give the path of Chromium or Chrome in "
        "the variable CHROMIUM",
    ),
]

DEPLOYMENT = "batch-inference/adhoc"
JOB_ID = "picture-book"
PAGE_SECONDS = 30.0
# Progress goes out every five seconds: two shards, side by side, that are seen on their way.
STEP_SECONDS = 0.25
COLUMNS = [
    *("shard", "state", "device", "rows", "failed", "resumed", "tokens", "tokens/s"),
    *("preemptions", "cached", "wasted"),
]
WRONG_JOB = {
    "name": "a",
    "sources": [{"path": "a.jsonl"}],
    "engine": {"model_path": "mock", "scheduler": {"order": "random"}},
}


class Screen:
    """A page of the UI in a browser."""

    def __init__(self, page: Page, ui_url: str, pictures: Path) -> None:
        self.page = page
        self.asked_elsewhere: list[str] = []
        self._ui_url = ui_url
        self._pictures = pictures
        page.set_default_timeout(PAGE_SECONDS * 1000)
        page.on("request", lambda request: self._note(request.url))

    def _note(self, url: str) -> None:
        if not url.startswith((f"{self._ui_url}/", "data:", "blob:")):
            self.asked_elsewhere.append(url)

    def open(self, path: str) -> None:
        # Not before: a run's page that still loads goes back to its first tab.
        self.page.goto(f"{self._ui_url}/{path}", wait_until="networkidle")

    def open_tab(self, name: str, shows: str) -> None:
        """Click a tab until this is seen: a page that still arrives does not take the click."""
        tab = self.page.locator(f"#{name.lower().replace(' ', '-')}").last
        wanted = self._line(shows)

        def is_shown() -> bool:
            tab.click()
            try:
                wanted.wait_for(timeout=1000)
            except TimeoutError:
                return False
            return True

        wait_until(is_shown, f"tab {name} with {shows}")

    def follow(self, link: str, to: str) -> None:
        """Click the first link that has this text, and wait until the address has this part."""
        self.page.get_by_role("link", name=link).first.click()
        self.page.wait_for_url(f"**/{to}/**")

    def text(self) -> str:
        return self.page.inner_text("body")

    def wait_for(self, pattern: str) -> None:
        """Wait until a line of the page fits, and can be seen."""
        try:
            self._line(pattern).wait_for()
        except TimeoutError as error:
            raise AssertionError(f"no {pattern!r} on the page:\n{self.text()}") from error

    def _line(self, pattern: str) -> Locator:
        return self.page.get_by_text(re.compile(rf"^\s*{pattern}\s*$")).first

    def take_picture(self, name: str) -> None:
        self.page.wait_for_load_state("networkidle")
        self.page.screenshot(path=self._pictures / f"{name}.png", animations="disabled")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    nothing_outside = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*sandbox, nothing_outside]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def run_id(prefect: Prefect, worker: Worker, folder: Path) -> UUID:
    """Ask for a run that takes some twenty seconds."""
    job = make_job(
        folder,
        questions(64),
        job_id=JOB_ID,
        engine__device_ids=[0, 1],
        engine__runtime={"mock_step_seconds": STEP_SECONDS},
    )
    return prefect.run_deployment(DEPLOYMENT, config=job.model_dump(mode="json"))


@pytest.fixture
def screen(browser: Browser, prefect: Prefect, tmp_path: Path) -> Iterator[Screen]:
    pictures = Path(os.environ.get("TOKENMILL_UI_PICTURES") or tmp_path)
    pictures.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": 1400, "height": 1100})
    screen = Screen(page, prefect.api_url.removesuffix("/api"), pictures)
    yield screen
    page.close()
    assert screen.asked_elsewhere == []


def test_a_run_on_its_way_shows_its_name_its_shards_and_how_far_they_are(
    prefect: Prefect, run_id: UUID, screen: Screen
) -> None:
    prefect.wait_for_state(run_id, "Running")
    screen.open(f"runs/flow-run/{run_id}")
    screen.wait_for(JOB_ID)
    progress = r"[1-9]\d*/32 rows, 0 failed, [1-9]\d* tokens/s, [1-9]\d* tokens"
    screen.open_tab("Artifacts", shows=progress)
    assert {"Running", "PROGRESS", "shard-0000", "shard-0001"} <= set(screen.text().splitlines())
    screen.take_picture("run")

    screen.open_tab("Task Runs", shows="shard-0000")
    screen.follow("shard-0000", to="runs/task-run")
    screen.wait_for("Task inputs")
    screen.open_tab("Artifacts", shows=progress)
    assert {JOB_ID, "shard-0000", "Running"} <= set(screen.text().splitlines())
    screen.take_picture("shard")


def test_the_form_of_the_deployment_says_what_each_setting_of_a_job_is(
    prefect: Prefect, worker: Worker, screen: Screen
) -> None:
    with prefect.client() as client:
        deployment_id = client.read_deployment_by_name(DEPLOYMENT).id
    screen.open(f"deployments/deployment/{deployment_id}/run")
    screen.wait_for("Name of the job; job ids begin with it.")
    screen.wait_for("Validate parameters")
    text = _as_shown(screen.text())
    fields = JobConfig.model_fields
    said = {
        name: field.description or str(getdoc(field.annotation)) for name, field in fields.items()
    }
    assert [name for name, line in said.items() if _as_shown(line) not in text] == []
    titles = {line.removesuffix(" (Optional)") for line in screen.text().splitlines()}
    assert {name for name in fields if name.replace("_", " ").title() not in titles} == set()
    assert "A job, or the path of its YAML file where the worker runs." in text
    assert "Folder with config.json, safetensors and the tokenizer." in text  # a section's field
    assert "Mock Step Seconds (Optional)" not in text
    screen.take_picture("form")

    screen.page.get_by_text("YAML file", exact=True).click()
    screen.take_picture("form-path")

    screen.page.get_by_text("JSON", exact=True).click()
    screen.page.locator("textarea").fill(json.dumps(WRONG_JOB))
    screen.page.get_by_role("button", name="Submit").click()
    screen.wait_for(".* failed for field 'config.engine.scheduler.order'. .*")
    screen.take_picture("form-refused")


def _as_shown(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def test_a_finished_run_has_a_table_of_its_shards_and_a_summary_with_the_next_commands(
    prefect: Prefect, run_id: UUID, screen: Screen
) -> None:
    prefect.wait_for_state(run_id, "Completed")
    screen.open(f"runs/flow-run/{run_id}")
    screen.open_tab("Artifacts", shows="summary")
    assert {"Completed", "TABLE", "shards", "MARKDOWN"} <= set(screen.text().splitlines())
    screen.take_picture("finished")

    screen.follow("shards", to="artifacts/artifact")
    screen.wait_for("rows of the job, figures of this run")
    screen.wait_for("0001")
    assert screen.page.locator("th").all_inner_texts() == COLUMNS
    for index, row in enumerate(screen.page.locator("tbody tr").all()):
        cells = [cell.strip() for cell in row.locator("td").all_inner_texts()]
        assert cells[:6] == [f"{index:04d}", "done", "mock", "32", "0", "0"]
        assert float(cells[7]) > 0
        assert cells[-1] == "0"
    screen.take_picture("shards")

    screen.open(f"runs/flow-run/{run_id}")
    screen.open_tab("Artifacts", shows="summary")
    screen.follow("summary", to="artifacts/artifact")
    screen.wait_for("Where the time went")
    text = screen.text()
    assert "finished: 64 ok, 0 failed" in text
    assert f"\ntokenmill status {JOB_ID} --ledger sqlite:///" in text
    assert f"\ntokenmill export {JOB_ID} --output answers.jsonl --ledger sqlite:///" in text
    assert re.search(r"^wait_for_device +#+ +\d+% \d+\.\d s$", text, re.MULTILINE)
    screen.take_picture("summary")


def test_a_run_that_was_stopped_says_how_to_go_on(
    prefect: Prefect, worker: Worker, screen: Screen, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path,
        questions(64),
        job_id="cut-short",
        max_runtime_seconds=2,
        engine__runtime={"mock_step_seconds": STEP_SECONDS},
    )
    run_id = prefect.run_deployment(DEPLOYMENT, config=job.model_dump(mode="json"))
    prefect.wait_for_state(run_id, "Failed")
    screen.open(f"runs/flow-run/{run_id}")
    screen.open_tab("Artifacts", shows="summary")
    screen.follow("summary", to="artifacts/artifact")
    screen.wait_for("cut-short")
    screen.wait_for("Retry of this flow run goes on with this job too.")
    text = screen.text()
    assert "\ntokenmill resume cut-short --ledger sqlite:///" in text
    assert "\ntokenmill export cut-short --output answers.jsonl --ledger sqlite:///" in text
    screen.take_picture("stopped")


def test_nothing_that_was_shown_is_left_running(worker: Worker) -> None:
    wait_until(lambda: not worker.engines(), "the engines have ended with their runs")
