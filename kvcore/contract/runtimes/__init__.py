"""What vendors with a CUDA-compatible runtime share: identity, management libraries, and the back ends that allocate.

NVIDIA's CUDA and Iluvatar's CoreX have management libraries of one shape, one rule of visibility and the same three
ways to memory: the driver, Paddle and torch. Each is here once; a plugin adds its libraries' names and its facts.
"""
