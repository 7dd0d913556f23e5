"""The one door to the hardware: device, collectives, memory figures, random state, fused operators, profiler.

Nothing outside this package names a device or its communication backend. The modules are imported by name
(`from mindspeed_llm.platform import device`); importing the package itself imports nothing.
"""
