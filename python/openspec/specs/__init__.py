"""Descriptions that cross into the compiled core: of targets, heads and runners.

`csrc/bind/specs.h` reads them field by field. They hold what is known once a checkpoint and the
settings are checked; nothing here reads or checks.
"""
