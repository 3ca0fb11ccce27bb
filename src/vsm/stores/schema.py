"""The tables of a store, as migrations from each version to the next."""

from vsm.errors import StoreError
from vsm.stores.databases import Pool

# Never change a migration: stores that have passed it will not run it again.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE vsm_tasks (
            id TEXT PRIMARY KEY,
            place {integer} NOT NULL,
            name TEXT NOT NULL,
            created TEXT NOT NULL,
            version {integer} NOT NULL
        )""",
        """CREATE TABLE vsm_examples (
            id TEXT PRIMARY KEY,
            task TEXT NOT NULL REFERENCES vsm_tasks (id) ON DELETE CASCADE,
            place {integer} NOT NULL,
            label TEXT NOT NULL,
            file TEXT NOT NULL,
            created TEXT NOT NULL,
            remembered {integer} NOT NULL,
            embedding {vector} NOT NULL,
            thumbnail {blob} NOT NULL,
            original {blob}
        )""",
        "CREATE UNIQUE INDEX vsm_examples_of_task ON vsm_examples (task, place)",
        """CREATE TABLE vsm_memory (
            version {integer} NOT NULL,
            encoder TEXT NOT NULL,
            fingerprint TEXT NOT NULL,
            kind TEXT NOT NULL,
            method TEXT NOT NULL,
            step {integer} NOT NULL,
            dtype TEXT NOT NULL,
            width {integer} NOT NULL,
            shared {blob} NOT NULL
        )""",
        """CREATE TABLE vsm_classes (
            name TEXT PRIMARY KEY,
            folded TEXT NOT NULL,
            place {integer} NOT NULL,
            class_id {integer} NOT NULL,
            count {integer} NOT NULL,
            last_update {integer} NOT NULL,
            freedom {integer} NOT NULL,
            added {integer} NOT NULL,
            mean {vector} NOT NULL,
            content {blob} NOT NULL,
            factors {blob} NOT NULL,
            thumbnail {blob}
        )""",
        """CREATE TABLE vsm_events (
            place {integer} PRIMARY KEY,
            event TEXT NOT NULL
        )""",
    ),
    (  # rows written before have no digest
        "ALTER TABLE vsm_memory ADD COLUMN digest TEXT",
        "ALTER TABLE vsm_examples ADD COLUMN digest TEXT",
    ),
)


def migrate(pool: Pool) -> None:
    """Bring the tables to the newest version; of several processes one does it, others wait."""
    database = pool.database
    newest = len(MIGRATIONS)
    with pool.writing(exclusive=True) as connection:
        table = "CREATE TABLE IF NOT EXISTS vsm_schema (version {integer} NOT NULL)"
        connection.change(table.format_map(database.types))
        [[found]] = connection.rows("SELECT COALESCE(MAX(version), 0) FROM vsm_schema")
        if type(found) is not int:
            raise StoreError(f"store: {database.name} is damaged: its version is not a number")
        if found > newest:
            raise StoreError(
                f"store: {database.name} has tables of version {found}, but this vsm knows only "
                f"those up to {newest}; use the vsm that wrote it, or a newer one"
            )
        database.prepare(connection)  # also where another process migrated while this one waited
        for version in range(found, newest):
            for statement in MIGRATIONS[version]:
                connection.change(statement.format_map(database.types))
            connection.change("INSERT INTO vsm_schema VALUES (?)", version + 1)
