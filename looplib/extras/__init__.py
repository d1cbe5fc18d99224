"""What is imported only where it is asked for.

`keras`, `orbit`, `parameter_server`, `records`, `sweep`, `tools` and `trackers` may use every other room; no room
imports them at its top.
"""
