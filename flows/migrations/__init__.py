"""Alembic migrations of the ledger; run by flows.database when a ledger is opened.

To write the next one: change flows.schema, add `versions/000N_what.py` by hand, append its
revision below. The tests compare the result with flows.schema on both databases.
"""

REVISIONS = ("0001", "0002")
HEAD = REVISIONS[-1]
# Not Alembic's own name for it: the ledger may share a PostgreSQL database with Prefect's tables.
VERSION_TABLE = "tokenmill_version"
