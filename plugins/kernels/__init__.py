"""What the three operators' GPU kernels share: descriptions, ahead-of-time compilation, launching.

`plan.py` and `cubin.py` need neither Triton nor torch; `launch.py` needs only cuda-bindings;
`compile.py` and `triton_run.py` are for build machines and tests.
"""
