"""Parallelism of the FSDP2 backend: the device mesh, then one function per parallelism, applied in `parallelize`."""
