"""Release of Weft: sdist, wheel, chart and notes from a tag, the same bytes each time."""
