"""Who listens to events, and until when."""

from kernlib import events


def test_each_subscription_ends_once_and_alone():
    heard = []
    first, second = events.subscribe(heard.append), events.subscribe(heard.append)
    try:
        first()
        first()
        events.emit("lookup", "", "", "")
        assert len(heard) == 1
    finally:
        second()
    events.emit("lookup", "", "", "")
    assert len(heard) == 1 and heard.append not in events.watched
