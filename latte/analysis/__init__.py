"""Looking at Latte: implied attention, figures and HTML reports."""
