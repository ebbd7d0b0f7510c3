"""kvcore platform for CUDA devices."""
