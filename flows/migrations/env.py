"""What Alembic runs: the migrations, on the connection and in the transaction of the caller."""

from alembic import context

from flows.migrations import VERSION_TABLE
from flows.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
