"""The warm start of workers that stand in: they import nothing slow."""
