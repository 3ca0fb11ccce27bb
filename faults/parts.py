"""All parts of the campaign."""

from faults import damage, environments, kills, sharing
from faults.bench import Group
from faults.suites import suite


def all_groups() -> list[Group]:
    """Return every group of cases, part after part."""
    requests = [
        Group(
            *("requests", f"every endpoint, {kind}", 1),
            suite("test_serving_fuzz.py", kind, "VSM_FUZZ", 40, f"requests, {kind}", each=18),
        )
        for kind in ("sqlite", "postgresql")
    ]
    return [
        *damage.groups(),
        *kills.groups(),
        *sharing.groups(),
        *environments.groups(),
        *requests,
    ]
