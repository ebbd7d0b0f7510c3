"""The conformance suite on every platform of this repository, as a vendor runs it: this line is all that it takes.

The accelerators are simulated (tests/conftest.py); ``--kvcore-real`` runs the suite on those of the machine.
"""

from kvcore.conformance.test_platforms import test_platform  # noqa: F401
