"""The rules of the ledger as steps: generators that yield reads, writes and events and get the answers sent in.

No asyncio, no NATS: whoever drives them (the shell, a test, the simulator) decides what happens between two steps,
which is where crashes, duplicates and other writers live.
"""
