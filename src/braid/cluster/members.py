"""The brokers of the cluster: which are alive, and which are to own nothing.

A broker with a registration is alive; the registration lives as long as the broker's lease. A drain is a second key
without a lease: a broker that restarts in the middle of its maintenance must not be given segments again. The state
that is shown of a broker follows from the two and from what it owns (snapshot.py), so that no third record can disagree
with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from braid.metadata import paths
from braid.metadata.store import Compare
from braid.metadata.view import Table, View
from braid.model.cluster import BrokerState, Registration
from braid.model.ids import Revision
from braid.model.load import LoadReport


class Members:
    def __init__(self, view: View) -> None:
        self.brokers: Final[Table[str, Registration]] = view.add(
            Table(paths.BROKERS_PREFIX, paths.broker_of, Registration.from_json, paths.broker)
        )
        self.drains: Final[Table[str, bytes]] = view.add(
            Table(paths.DRAINS_PREFIX, paths.broker_of_drain, bytes, paths.drain)
        )
        self.loads: Final[Table[str, LoadReport]] = view.add(
            Table(paths.LOADS_PREFIX, paths.broker_of_load, LoadReport.from_json, paths.load)
        )

    def is_live(self, broker_id: str) -> bool:
        return broker_id in self.brokers

    def is_active(self, broker_id: str) -> bool:
        """Tell whether the broker may be given segments."""
        registration = self.brokers.get(broker_id)
        return (
            registration is not None and registration.state == BrokerState.ACTIVE.value and broker_id not in self.drains
        )

    def address(self, broker_id: str) -> str:
        """Return the broker's address; empty if the broker is not there."""
        registration = self.brokers.get(broker_id)
        return registration.address if registration is not None else ""


def still_gone(brokers: Iterable[str]) -> list[Compare]:
    """Return the conditions of a write that gives up the disks of these brokers: a broker that is back has lost
    nothing."""
    return [Compare(paths.broker(broker), Revision(0)) for broker in brokers]
