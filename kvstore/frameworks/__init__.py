"""Backends and layers for frameworks with distributed interfaces of their own.

Their public names are short: ``kvstore.torch`` is ``kvstore/frameworks/torch``. ``import kvstore``
imports none of them. Each imports its framework when it is first used.
"""
