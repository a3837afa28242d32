"""Schedules that once failed, each with what was wrong. A seed is kept although later changes may lead it elsewhere.

The number in front is the seed. What can be shown without a whole schedule has a unit test of its own as well.
"""

from __future__ import annotations

REGRESSIONS: dict[int, str] = {
    37: "a job's end that overtook its submission was kept in memory only, and lost with a crash of placement",
    45: "a release named the assignment that a move had just replaced: the new seat was never released",
    67: "a late duplicate of WorkerExited made a worker that had restarted look unready for ever",
    99: "a write of a killed placement landed on top of its successor's: records were put, not compared and swapped",
    52: "a submission refused for its name ran when it was delivered again after the name had come free",
    180: "a wait spoke of a free device on a node that does not accept the role",
    148: "the janitor took a seat for unlisted because its mirror lagged, and freed it under a running worker",
    113: "a job's end was announced before its record was written, and never written after a crash",
    128: "workloads of a job that was never recorded asked for seats",
    313: "a wait spoke of free devices that no claim can get (larger than the size of their mixed node)",
    56: "a wait repeated an answer of the ledger instead of saying what is missing",
    1227: "a LoRA runtime was kept for a job that had ended: a crash came between the two records",
    760: 'a late try of the launcher\'s "not ready" landed on what the restarted worker had said of itself',
    1496: "a worker that ended on a quarantined claim was neither started again nor given another seat",
    2244: "an end was acknowledged because its submission had been refused, before that refusal was written",
    775: "the simulator's mirror took back a change that had overtaken its list",
    12: 'a late try of a worker\'s own "not ready yet" landed on its "ready"',
    84: "a worker that had the device for itself went on working although its lease had lapsed",
    97: "a ledger that was told to stop during an outage ended with a TimeoutError instead of code 0",
    150: "a device hold that was given up as lost landed after a long outage, and nobody released it",
    210: "a worker read the record of an earlier incarnation, which had been exclusive, and took no turns",
    35: "a claim that a replica with the old limit had refused was never offered again (S7)",
    385: "a device was freed under a process without a record, whose seat was lost with the ledger's bucket (L7)",
    771: "a launcher ended with a KeyError: a claim was deleted between its decision and the start of a worker",
    5417: "a placement that was stopped past its lease admitted a job that its successor had refused (W1)",
    1189: "a worker whose lease lapsed while it came to the device began to work on it",
    34: "a worker came up while the ledger's bucket was lost, took no turns, and went on so after the rebuild (L7, T2)",
    20404: "a WorkerExited that came twice was acknowledged before what followed from it was written (E6)",
    2027: "a seat came free a moment before its host memory, and a smaller waiter got it before an earlier one (W1)",
    23119: "a claim with seats for two, host memory for one, was offered to two waiters, and the later got it (W1)",
    100563: "a worker that its launcher had not recorded when both and the ledger were lost took no turns (L7, T2)",
    1151: "the seat of a worker that its launcher had not recorded was rebuilt as empty: it ran twice (L7)",
    1096: "the simulator did not know on what claim a worker was that came up while the ledger's bucket was lost",
    113215: "the simulator left a request of its client without any answer: the ledger was never rebuilt",
    115078: "an end that overtook its submission was acknowledged before that submission was written (E6)",
    310049: "a launcher cut off between a worker's start gate and its record started it when it came back (B7)",
    402217: "a LoRA runtime known only from its ended job's record was forgotten by a restart, its seat held for ever",
}
