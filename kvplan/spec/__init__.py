"""What is served on what: model, GPU, engine flags, and the catalogues of the first two."""
