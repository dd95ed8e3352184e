"""What fits: the formula, the KV layout of an engine, the budget of a GPU, and their sum."""
