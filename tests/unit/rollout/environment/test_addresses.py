"""Private hosts, and the choice of a server's variant."""

from __future__ import annotations

import pytest

from orhpc.rollout.environment.addresses import choose_variant, is_private

pytestmark = pytest.mark.slow


def test_without_a_setting_the_servers_default_variant_is_chosen() -> None:
    assert choose_variant("Org/Other", None, ["first", "second"]) == "first"
    assert choose_variant("Org/Second", None, ["first", "second"]) == "second"
    assert choose_variant("Org/Second", None, []) is None
    assert choose_variant("Org/Second", "ANY", []) == "any"


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("node17", True),
        ("8.8.8.8", False),
        ("api.example.org", False),
    ],
)
def test_private_hosts_are_recognized(host: str, private: bool) -> None:
    assert is_private(host) == private
