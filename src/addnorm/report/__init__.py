"""Reports: self-contained HTML pages, SVG charts, and plots for a terminal."""

from addnorm.report.bars import NARROW, bar_chart, interval_chart
from addnorm.report.fans import fan_chart
from addnorm.report.maps import attention_map, heat_map
from addnorm.report.page import Page, write_picture
from addnorm.report.terminal import plot_text, sparkline
from addnorm.report.xy_charts import Mark, line_chart, reliability_chart, scatter_chart

__all__ = [
    "NARROW",
    "Mark",
    "Page",
    "attention_map",
    "bar_chart",
    "fan_chart",
    "heat_map",
    "interval_chart",
    "line_chart",
    "plot_text",
    "reliability_chart",
    "scatter_chart",
    "sparkline",
    "write_picture",
]
