"""tools/loaders: which loaders are hinted, tried with the real libraries (docs/LOADERS.md)."""
