"""Quantizers: rounding, GPTQ and AWQ, layer by layer over calibration text, written in public checkpoint layouts.

Knows: how matrices are rounded to integers. Does not know: how they are read (`forerun.quant`), nor commands.
"""
