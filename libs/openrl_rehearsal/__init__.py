"""Rehearsal (D4): the real placement and ledger cores on a virtual clock, over workers that are only times.

    client ──▶ placement core ──▶ ledger core ──▶ simulated launcher ──▶ simulated workers
                                  arbiter of turns ◀──▶ on devices that they share

No NATS, no processes, no sleeping: a drill of minutes takes milliseconds, a fleet of a thousand devices seconds. The
times come from a profile file that says of each whether it was measured, derived, assumed or fitted.

What it does not do: failures (crashes, lost nodes, lost messages: that is what ``tests/simulation`` is for), devices in
groups, and anything that two replicas of a service would do to each other.
"""
