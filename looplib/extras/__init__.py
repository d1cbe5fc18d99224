"""What is imported only where it is asked for.

`keras`, `orbit`, `parameter_server`, `sweep`, `tools` and `writers` may use every other room; no room imports them at
its top.
"""
