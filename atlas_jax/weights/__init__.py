"""Parameters in and out of the layouts that other engines read."""
