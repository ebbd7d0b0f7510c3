"""kvcore beside other programs that size caches."""
