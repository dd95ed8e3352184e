"""The compiled scheduler and block pool: content keys, the core, contiguous reservations."""
