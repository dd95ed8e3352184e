"""Request traces: the columns, a reader for each public format, generators."""
