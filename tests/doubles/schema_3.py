"""The journal as the plugin's releases until eea44c1 wrote it.

Who may use a region stood in three kinds of rows: the former pods of a region, the nodes that they
may have open (loans), and the pods of a ResourceClaim.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

_KINDS = {
    "facts": "epochs",
    "allocations": "claims",
    "memory_clear_pending": "debts",
    "pending_poststops": "strays",
    "claim_owners": "holders",
    "debug_holds": "debugs",
    "alias_bindings": "meanings",
}
_FIELDS = {
    "prestart_seen": "touched",
    "missed_prestart": "exposed",
    "instance": "epoch",
    "number": "generation",
}
"""Names of schema 3: of kinds of rows, and of the fields of an allocation."""


def _row(kind: str, key: str, value: str) -> tuple[str, str, str]:
    if kind == "allocations":
        row = json.loads(value)
        value = json.dumps({_FIELDS.get(name, name): told for name, told in row.items()})
    return _KINDS.get(kind, kind), key, value


def rewrite(journal: Path) -> None:
    """Rewrite a present journal so, while no plugin has it open.

    Raises:
        sqlite3.Error: it cannot be read or written, and is as it was.
    """
    with closing(sqlite3.connect(journal)) as db, db:
        rows = db.execute("SELECT kind, key, value FROM journal").fetchall()
        rows = [_row(*row) for row in rows]
        kinds = {"regions", "holders", "tenancies", "loans"}
        kept = [row for row in rows if row[0] not in kinds]
        values = {(kind, key): json.loads(value) for kind, key, value in rows if kind in kinds}
        holders = [row for (kind, _), row in values.items() if kind == "holders"]
        for row in holders:
            row["pods"] = []
        for kind, key in [*values]:
            if kind == "tenancies":
                row, of = values.pop((kind, key)), json.loads(key)
                devices = {of["region"], of["region"].partition("-p")[0]}
                if of["pod"] is None:
                    continue
                if row.get("left"):
                    region = values.get(("regions", of["region"]), {})
                    region.setdefault("former", []).append(of["pod"])
                    for node in row["nodes"]:
                        loan = {"pod": of["pod"], "region": of["region"], "node": node}
                        values["loans", json.dumps(loan)] = True
                else:
                    for holder in holders:
                        if devices & {*holder["devices"]}:
                            holder["pods"].append(of["pod"])
        db.execute("DELETE FROM journal")
        kept += [(*of, json.dumps(value)) for of, value in values.items()]
        db.executemany("INSERT INTO journal VALUES (?, ?, ?)", kept)
        db.execute("PRAGMA user_version = 3")
