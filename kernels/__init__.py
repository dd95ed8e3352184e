"""Paged-attention kernels (Triton), their float64 reference and the CPU backend.

Imported as ``kvplan.kernels``; importing this package alone imports neither torch nor triton.

- `reference`: what everything is checked against: gather by block table, float64
- `decode`, `prefill`, `mla`: the GPU kernels; `attend` is the loop over KV tiles that decode's launches
  share, `combine` joins the parts of long sequences, `splits` decides on the parts (no torch)
- `cache_ops`: write new tokens to their slots, copy blocks, swap them with host memory
- `cpu`: paged decode on CPU cores (numba), with its vector code in `cpu_simd`
- `checks`, `device`: what is verified before a launch, and what a launch must know of its GPU

`make kernels-check` compiles every tuned configuration without a GPU and prints registers, shared memory and
bytes in flight. What only a GPU can tell: speed, races, and layout faults that the interpreter cannot show.
"""
