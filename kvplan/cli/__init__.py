"""The commands: each parses, calls a floor below, and renders."""
