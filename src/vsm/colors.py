"""The colors of all pictures, told apart by everybody; nothing here imports anything."""

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
RIGHT, WRONG, QUIET = "#228833", "#cc3311", "#bbbbbb"
