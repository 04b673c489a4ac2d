"""tokenmill's flows: what a job is. Prefect stands at its edge, the ledger at its heart."""
