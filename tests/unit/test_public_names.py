"""What programs import: every public type has its name in `braid`, `braid.sync` or `braid.errors`, at no cost."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys

import pytest

import braid
import braid.errors
import braid.sync
from braid.model.errors import BraidError

BUILT_IN = {"None", "Self", "Backoff"}


@pytest.mark.parametrize(("module", "client"), [(braid, braid.Client), (braid.sync, braid.sync.Client)])
def test_everything_that_a_client_returns_has_a_public_name(module: object, client: type) -> None:
    public = [each for name, each in vars(client).items() if not name.startswith("_")]
    functions = [each.fget if isinstance(each, property) else each for each in public]
    returned = {str(each.__annotations__["return"]) for each in functions if inspect.isfunction(each)}
    assert {"Admin"} < returned
    for name in returned - BUILT_IN:
        assert inspect.isclass(getattr(module, name)), name


@pytest.mark.parametrize("module", [braid, braid.sync])
def test_every_promised_name_exists_and_no_other_does(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(module, name) is not None
        assert name in dir(module) or module is braid.sync
    with pytest.raises(AttributeError, match="no attribute 'make_coffee'"):
        module.make_coffee  # type: ignore[attr-defined]  # noqa: B018 (the access is the test)


def test_errors_are_imported_by_name() -> None:
    from braid.errors import TopicExists

    assert TopicExists is braid.errors.TopicExists is BraidError.by_code["topic-exists"]
    exported = {each for each in vars(braid.errors).values() if inspect.isclass(each) and issubclass(each, BraidError)}
    ours = {each for each in BraidError.by_code.values() if each.__module__ == BraidError.__module__}
    assert exported == {BraidError, *ours}


def test_a_time_that_has_passed_is_also_a_timeout_error() -> None:
    error = braid.errors.TimedOut("JOIN was not answered within 5 s")
    assert isinstance(error, TimeoutError)
    for twin in (error, error.again(), pickle.loads(pickle.dumps(error))):
        assert (str(twin), twin.code, twin.retriable) == ("JOIN was not answered within 5 s", "timed-out", False)
        assert isinstance(twin, braid.errors.TimedOut)


def test_errors_travel_between_processes_with_their_fields() -> None:
    error = braid.errors.PositionDiverged("the records are lost", 3, 17, 9)
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))
    assert (twin.earliest, twin.end, twin.parted_at) == (3, 17, 9)


def test_importing_braid_imports_nothing_that_costs() -> None:
    costly = ["asyncio", "numpy", "pyarrow", "ssl"]
    check = f"import sys, braid, braid.errors; print(*{{*{costly}}} & {{*sys.modules}})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], "what was imported too early"
