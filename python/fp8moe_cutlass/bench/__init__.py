"""`fp8moe-cutlass bench ops | layer | gemm | ep`: times on this machine.

Each module runs one subcommand and returns its record, a dict:
{"environment": {...}, "results": [row, ...]}. record.py has the environment, timing.py the clocks,
tables.py and layer_plot.py show a record.
"""
