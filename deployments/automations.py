"""Creates or updates the automations of tokenmill on the Prefect server of PREFECT_API_URL.

One marks a flow run as crashed when its heartbeats stop: its process, and the worker that would
have told so, are gone. The other calls a webhook when a flow run failed, crashed or is late; it is
made when TOKENMILL_WEBHOOK_URL is set. The URL, which is as good as a password for many services,
is kept in a block of Prefect, which encrypts it. Running this again changes what has changed.
"""

import logging
import os
from datetime import timedelta
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.types import SecretDict
from pydantic import SecretStr

logger = logging.getLogger(__name__)

WEBHOOK_URL_VARIABLE = "TOKENMILL_WEBHOOK_URL"
WEBHOOK_BLOCK_NAME = "tokenmill-notifications"
VANISHED_NAME = "tokenmill: a run whose heartbeats stop has crashed"
NOTIFY_NAME = "tokenmill: tell of runs that failed, crashed or are late"
# prefect.yaml sets 30 seconds between heartbeats. A server that was away has heard none: one that is
# back within this time takes no run for gone. A slot of a concurrency limit is kept as long.
SILENCE = timedelta(seconds=300)

_RUN = "prefect.flow-run"
_HEARTBEAT = f"{_RUN}.heartbeat"
# What ends the wait for the next heartbeat; a run that waits for its retry has none either.
_ENDED = {f"{_RUN}.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
_WAITS = {f"{_RUN}.{name}" for name in ("AwaitingRetry", "Scheduled", "Paused", "Suspended")}
_OF_A_RUN = {"prefect.resource.id": f"{_RUN}.*"}
_OF_OUR_FLOW = {"prefect.resource.role": "flow", "prefect.resource.name": "batch-inference"}
# The shape that Slack, Mattermost, Teams and most others take.
_PAYLOAD = (
    '{"text": {{ ("Flow run " ~ flow_run.name ~ " is " ~ flow_run.state.name ~ ": " '
    '~ flow_run.state.message ~ " " ~ (flow_run | ui_url)) | tojson }}}'
)


def crash_vanished_runs(silence: timedelta = SILENCE) -> AutomationCore:
    """Return the automation that ends runs of which nothing is heard any more."""
    return AutomationCore(
        name=VANISHED_NAME,
        description="Created by deployments/automations.py.",
        trigger=EventTrigger(
            after={_HEARTBEAT},
            expect={_HEARTBEAT} | _ENDED | _WAITS,
            match=_OF_A_RUN,
            match_related=_OF_OUR_FLOW,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silence,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"no heartbeat for {silence.total_seconds():.0f} s: the process is gone, "
                "or could not reach the server; Retry goes on with the job",
            )
        ],
    )


def notify_of_trouble(block_id: UUID) -> AutomationCore:
    """Return the automation that calls a webhook."""
    return AutomationCore(
        name=NOTIFY_NAME,
        description="Created by deployments/automations.py.",
        trigger=EventTrigger(
            expect={f"{_RUN}.{name}" for name in ("Failed", "Crashed", "Late")},
            match=_OF_A_RUN,
            match_related=_OF_OUR_FLOW,
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[CallWebhook(block_document_id=block_id, payload=_PAYLOAD)],
    )


def save(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create an automation, or update the one of its name; one that was switched off stays off."""
    existing = client.read_automations_by_name(automation.name)
    if not existing:
        client.create_automation(automation)
        logger.info("created: %s", automation.name)
        return
    wanted = automation.model_copy(update={"enabled": existing[0].enabled})
    client.update_automation(existing[0].id, wanted)
    logger.info("updated: %s", automation.name)


def save_webhook(url: str) -> UUID:
    """Keep the URL in a block of the server and return the block's id."""
    webhook = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    block_id = webhook.save(WEBHOOK_BLOCK_NAME, overwrite=True)
    assert isinstance(block_id, UUID)
    return block_id


def main() -> None:
    """Bring the server's automations up to date."""
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    url = os.environ.get(WEBHOOK_URL_VARIABLE)
    with get_client(sync_client=True) as client:
        save(client, crash_vanished_runs())
        if url:
            save(client, notify_of_trouble(save_webhook(url)))
        else:
            logger.info("no notifications: %s is not set", WEBHOOK_URL_VARIABLE)


if __name__ == "__main__":
    main()
