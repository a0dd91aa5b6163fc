"""Backends and layers for frameworks that have distributed interfaces of their own.

Their public names are short: ``kvstore.torch`` is ``kvstore/frameworks/torch``. ``import kvstore``
imports none of these, and each imports its framework when it is used first.
"""
