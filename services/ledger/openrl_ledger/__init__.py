"""The ledger: owns every seat and serialises it by compare-and-swap (design: docs/rules.md, L1-L7, S1-S7)."""
