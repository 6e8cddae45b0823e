"""The version, in a module without imports so that any module can read it.

Between releases it ends in `.dev0`; `make test` refuses any other while no public address is set.
"""

__version__ = "0.2.0.dev0"
