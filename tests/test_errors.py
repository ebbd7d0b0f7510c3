"""Errors carry their parts across processes and into JSON."""

from __future__ import annotations

import inspect
import json
import pickle

import pytest

from kvcore import errors
from kvcore.errors import DoesNotFit, KvcoreError

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KvcoreError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_survive_pickling_and_become_json(kind: type[KvcoreError]) -> None:
    more = {"refusal": {"needed": 1}} if kind is DoesNotFit else {}
    error = kind("it failed", code="KV-X-001", where="here", got=3, expected=[4], hint="do", **more)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__
    assert json.loads(json.dumps(again.to_dict()))["got"] == "3"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_is_public_drawn_and_has_an_exit_status(kind: type[KvcoreError]) -> None:
    assert kind.__name__ in errors.__all__
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__
    assert kind.exit_code in (1, 2, 3)
