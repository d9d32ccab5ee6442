"""The report as one page: subjects, their data in columns, and the HTML around them."""

from stowplan.report.page.html import page_of
from stowplan.report.page.subject import Subject, Thing, subject_of

__all__ = ["Subject", "Thing", "page_of", "subject_of"]
