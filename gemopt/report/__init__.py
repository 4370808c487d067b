"""What gemopt did to a model, what it left alone, and why.

The compiler fills a :class:`Report` while it works and while the model runs; users read it, print it,
or save it as JSON or as one self-contained HTML page. Every site the compiler looked at ends as a
:class:`Rewrite` or as a :class:`Rejection`.

| file | what |
|---|---|
| ``values.py``  | the frozen records: Rewrite, Rejection, Cost, Change |
| ``graph.py``   | GraphReport: one compiled graph |
| ``collect.py`` | Report: all graphs of one model |
| ``source.py``  | an fx graph as a Python file that runs |
| ``text.py``    | the plain text, and the same through rich |
| ``html.py``    | the page, from ``templates/report.html.jinja`` |
"""

from __future__ import annotations

from gemopt.report.collect import SCHEMA, SCHEMA_VERSION, Report
from gemopt.report.graph import GraphReport
from gemopt.report.values import Change, Cost, Rejection, Rewrite

__all__ = ["SCHEMA", "SCHEMA_VERSION", "Change", "Cost", "GraphReport", "Rejection", "Report", "Rewrite"]
