"""Settings: options, files, and what they are checked against."""
