"""`--html`: a benchmark as one HTML file. `page.report_page` makes it."""
