"""MoEExperts: top-k routed SwiGLU experts, INT4 or float weights."""
