"""Plan and measure LLM serving with a paged KV cache."""

__version__ = "0.1.0"
