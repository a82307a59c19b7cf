"""The series recorded for a dashboard panel."""

from typing import Any

import pytest

from benchmarks import monitoring
from benchmarks.dashboard import Panel, Query


def test_a_panel_has_one_value_per_second_and_null_where_prometheus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def answer(url: str, path: str, **parameters: str) -> Any:
        asked.append(parameters)
        return {"result": [{"metric": {"method": "ngram"}, "values": [[100, "1.23456"], [102, "NaN"], [103, "0"]]}]}

    monkeypatch.setattr(monitoring, "ask", answer)
    query = Query('rate(x{job=~"$job"}[$__rate_interval])', "{{method}} drafted")
    panel = Panel(1, "Drafts", "short", x=0, y=0, width=8, height=8, queries=(query,))
    recorded = monitoring.recorded("http://here", panel, range(100, 104))
    assert recorded == {
        "title": "Drafts",
        "unit": "short",
        "series": {"ngram drafted": [1.235, None, None, 0.0]},
    }
    assert asked == [{"query": 'rate(x{job=~".*"}[5s])', "start": "100", "end": "103", "step": "1"}]
