"""Reports: a run folder becomes two self-contained pages, and several become a comparison.

`headline` writes the first sentences, `text` the others; `pages` and `comparison` build the pages.
"""

from reconbound.report.comparison import compare
from reconbound.report.pages import build, confidential_page, public_page
from reconbound.report.records import record_facts, record_table

__all__ = ["build", "compare", "confidential_page", "public_page", "record_facts", "record_table"]
