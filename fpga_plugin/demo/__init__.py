"""The kubelet double, and the story that `fpga-plugin demo` tells with it.

`double` plays kubelet's side of the device plugin API; tests and benchmarks use it too. `run`
runs the real daemon on simulated cards against it and shows what happens.
"""
