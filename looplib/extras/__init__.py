"""What is imported only where it is asked for.

Each folder is a plug-in, which the entry points in `setup.cfg` name, and may use every other room; no room imports one.
"""
