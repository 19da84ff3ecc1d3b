"""Pages a person wants to look at: one HTML file that needs nothing else, and its pictures."""

from addnorm.report.curves import Mark, lines, reliability, scatter
from addnorm.report.maps import attention, heat_map
from addnorm.report.page import Page, write_picture
from addnorm.report.rows import bars, intervals
from addnorm.report.terminal import plot_text, sparkline

__all__ = [
    "Mark",
    "Page",
    "attention",
    "bars",
    "heat_map",
    "intervals",
    "lines",
    "plot_text",
    "reliability",
    "scatter",
    "sparkline",
    "write_picture",
]
