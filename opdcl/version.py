"""The version, in a module without imports so that any module can read it."""

__version__ = "0.1.0"
