"""The page: one self-contained HTML file in which every token of every update of a run can be looked at."""
