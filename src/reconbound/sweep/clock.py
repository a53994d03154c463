"""Finds and ends leases that a clock which was set back would keep for hours, and reports it in one line."""

from __future__ import annotations

import time

from reconbound.sweep.faults import say
from reconbound.sweep.store import NEVER, Store

#: Seconds without a change after which such a lease is ended, if the sweep's own lease is shorter: a worker that lives
#: renews its lease every 5 seconds or more often, whatever its length.
STILL = 15.0


class Clock:
    """Watches the leases of a sweep while a worker waits.

    A lease that ends later than one taken now has a longer term, or was taken before the clock was set back. The first
    kind is renewed all the time. The second kind is not renewed, when its worker is dead.

    Args:
        store: the sweep's storage.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seen: dict[int, tuple[tuple[str, float], float]] = {}
        self.said = False

    def look(self) -> None:
        """Ends leases from before the clock was set back, and reports the first in one line."""
        leases, now, latest = self.store.leases(), time.monotonic(), self.store.now() + self.store.lease + 1
        for trial in self.store.trials():
            lease = leases.get(trial._trial_id)
            if lease is None or trial.state.is_finished() or not latest < lease.until < NEVER:
                continue
            mark = (str(lease.owner), float(lease.until))
            before, since = self.seen.setdefault(trial._trial_id, (mark, now))
            if before != mark:
                self.seen[trial._trial_id] = (mark, now)
            elif now - since >= max(STILL, self.store.lease) and self.store.take_away(lease) and not self.said:
                ahead = lease.until - self.store.now()
                self.said = say(
                    f"a worker gave no sign, and its lease lasts for {ahead:.0f} s more: the clock was set back. Its "
                    "settings are taken over"
                )


__all__ = ["Clock"]
