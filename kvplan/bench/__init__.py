"""Measured runs on this machine: ceilings, the kernel sweep, the check before each number."""
