"""The suite by which a platform's plugin proves itself; vendors run it, and so does kvcore.

::

    kvcore conformance acme                                                   # on the command line
    pytest --pyargs kvcore.conformance -k platform --kvcore-platform acme     # from anywhere, with pytest
    from kvcore.conformance.test_platforms import test_platform               # a vendor's tests/test_platforms.py

All three run the same checks (:mod:`kvcore.conformance.checks`), each in a process that the check cannot take down
with it, and say of every failure what was called, what came back, what was expected and how to mend it.
"""
