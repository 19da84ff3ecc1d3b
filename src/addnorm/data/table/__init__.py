"""Files and data frames to columns of numbers and codes."""
