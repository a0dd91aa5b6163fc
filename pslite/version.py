"""The version of the software, which must be the same on all nodes of a job."""

__version__ = "0.1.0"
