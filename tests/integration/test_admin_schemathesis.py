"""Requests that schemathesis makes up from the OpenAPI document of a real broker, right ones and wrong ones.

Every answer must be one that the document names, in the form that it names; none may be a server's failure; and what
breaks the document's rules must be refused. Names are made up too, so most requests meet nothing; therefore each
operation is also asked about a topic and a subscription that exist.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS, CheckContext, load_all_checks
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation, BaseSchema

from tests.kits.admin import ORDERS, AdminBroker, admin_broker


def no_failure(_: CheckContext, response: schemathesis.Response, __: schemathesis.Case[Any]) -> None:
    """Of the server's own errors, only *not in this version* is right: nothing here is to be tried again."""
    assert response.status_code < 500 or response.status_code == 501, response.text


load_all_checks()
CHECKED: list[Any] = [
    no_failure,
    *CHECKS.get_by_names(
        [
            "status_code_conformance",
            "content_type_conformance",
            "response_headers_conformance",
            "response_schema_conformance",
            "negative_data_rejection",
            "unsupported_method",
            "allow_header_conformance",
        ]
    ),
]
EXISTING = {"tenant": "public", "namespace": "default", "topic": "orders", "subscription": "billing"}
BOUNDED = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(name="broker", scope="module")
def _broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminBroker]:
    with admin_broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(name="rest", scope="module")
def _rest(broker: AdminBroker) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{broker.url}/openapi.json")


def operations(rest: BaseSchema) -> Iterator[APIOperation[Any, Any, Any, Any]]:
    for result in rest.get_all_operations():
        assert isinstance(result, Ok), result
        yield result.ok()


def ask_for_little(case: schemathesis.Case[Any]) -> None:
    """A broker opens each segment that a topic gets: a thousand of them, eight times, would take minutes."""
    for given_by_name in (case.path_parameters, case.query):
        for name in ("segments", "into"):
            if name in (given_by_name or {}):
                given_by_name[name] = 2 + int(given_by_name[name]) % 3


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize("existing", [False, True], ids=["anything", "what exists"])
def test_every_answer_is_as_the_document_says(
    broker: AdminBroker, rest: BaseSchema, mode: GenerationMode, existing: bool
) -> None:
    asked: Counter[str] = Counter()
    for operation in operations(rest):
        names = {parameter.name for parameter in operation.path_parameters} if existing else set()
        fixed = {name: value for name, value in EXISTING.items() if name in names}

        @given(case=operation.as_strategy(generation_mode=mode, path_parameters=fixed or None))
        @BOUNDED
        def ask(case: schemathesis.Case[Any]) -> None:
            if existing:
                if any(change in case.operation.label for change in ("/split/", "/merge/", "/repartition/")):
                    broker.ask("DELETE", f"{ORDERS}?force=true")  # Else it would have more and more segments.
                broker.ask("PUT", f"{ORDERS}?numInitialSegments=2")
                broker.ask("PUT", f"{ORDERS}/subscriptions/billing")
                if mode is GenerationMode.POSITIVE:
                    ask_for_little(case)
            asked[case.operation.label] += 1
            case.call_and_validate(checks=CHECKED, timeout=60)

        with contextlib.suppress(Unsatisfiable):  # some operations leave no room for a wrong request
            ask()
    assert len(asked) >= 15
    assert asked.total() >= 100
