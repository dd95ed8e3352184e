"""Result tables, one definition of each metric, and the atomic Parquet store."""
