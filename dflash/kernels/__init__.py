"""Triton kernels; without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), for tests."""
