"""Addresses, names and shares of drafts in the coordinator's settings."""

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.config.settings import CoordinatorSettings


def test_drafts_are_named() -> None:
    assert CoordinatorSettings().draft_entries == []
    settings = CoordinatorSettings(
        draft_address="current=a:1, current = dns:///b:2,new=unix:/x=y,c:3", draft_share="new=0.1"
    )
    assert settings.draft_entries == [("current", "a:1"), ("current", "dns:///b:2"), ("new", "unix:/x=y"), ("", "c:3")]
    assert settings.draft_shares == {"new": 0.1}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"draft_address": "a:1,b:2,a:1"}, "a:1 is listed twice"),
        ({"draft_address": "x=a:1,y=a:1"}, "a:1 is listed twice"),
        ({"draft_address": "a:1,b"}, "b has no port"),
        ({"draft_address": " ,"}, "no address is given"),
        ({"draft_address": "=a:1"}, "invalid draft name ''"),
        ({"draft_address": "my draft=a:1"}, "invalid draft name 'my draft'"),
        ({"draft_address": "x=a:1", "draft_share": "y=0.1"}, "draft_address has no draft named y"),
        ({"draft_share": "y=0.1"}, "draft_address has no draft named y"),
        ({"draft_address": "x=y=a:1"}, "invalid address y=a:1: use NAME=HOST:PORT"),
        ({"draft_address": "x="}, "invalid address x=: use NAME=HOST:PORT"),
        ({"draft_address": "x=a:1", "draft_share": "x"}, "x is not NAME=SHARE"),
        ({"draft_address": "x=a:1", "draft_share": ","}, "no share is given"),
        ({"draft_address": "x=a:1", "draft_share": "x=nan"}, "x=nan is not NAME=SHARE"),
        ({"draft_address": "x=a:1", "draft_share": "x=1.1"}, "x=1.1 is not NAME=SHARE"),
        ({"draft_address": "x=a:1", "draft_share": "x=0.1,x=0.2"}, "listed twice"),
        ({"draft_address": "x=a:1,y=b:1", "draft_share": "x=0.7,y=0.7"}, "add up to 1.4"),
    ],
)
def test_bad_drafts_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        CoordinatorSettings(**settings)
