"""Measurements of the system on this machine: seats, bus, start-up. Real services, a real bus, a store on a disk."""
