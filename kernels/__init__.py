"""Paged-attention kernels (Triton), their float64 reference and the CPU backend.

Imported as ``kvplan.kernels``. Importing this package imports neither torch nor triton.
"""
