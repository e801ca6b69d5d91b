"""One network for all of the deployment's tests: the road is walked once, and then faults are made on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A server and three sites, furnished, and a stranger who has nothing. No command was run yet."""
    from support.road import walking

    with walking(tmp_path_factory.mktemp("road"), others=("stranger",)) as furnished:
        yield furnished


@pytest.fixture(scope="session")
def running(road: object) -> object:
    """The road, walked, with thousands of rounds to play: faults are made in it one after the other."""
    from support.road import START, Road

    assert isinstance(road, Road)
    if not road.seen:  # test_road.py was not run before
        road.walk(*START)
    road.go_on(5000, deadline=60)
    return road
