"""Samples that are byte ranges of large files: where each lies, and that it is read ahead."""
